"""``etcd://HOST:PORT,HOST:PORT/PREFIX``: where a registry is; ``etcds://`` with certificates on both sides."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Self

from kvferry.proto.address import parse_address

SCHEME: Final = "etcd://"
TLS_SCHEME: Final = "etcds://"
DEFAULT_PREFIX: Final = "kvferry"

_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class RegistryAddress:
    """etcd's members, the prefix of all keys of one fleet, and whether both sides show certificates."""

    endpoints: tuple[str, ...]
    prefix: str
    has_tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ValueError with one sentence."""
        has_tls = url.startswith(TLS_SCHEME)
        if not (has_tls or url.startswith(SCHEME)):
            raise ValueError(f"{url!r} is not etcd://HOST:PORT,HOST:PORT or etcds://…, perhaps with /PREFIX")
        members, _, prefix = url.partition("://")[2].partition("/")
        endpoints = tuple(members.split(","))
        for endpoint in endpoints:
            parse_address(endpoint)
        prefix = prefix or DEFAULT_PREFIX
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"{prefix!r} is no prefix: 1 to 128 letters, digits, '.', '_' and '-'")
        return cls(endpoints, prefix, has_tls)
