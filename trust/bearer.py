"""The API token that a client sends: where it comes from, and that it never goes out in clear."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvferry.proto.address import parse_address
from kvferry.trust.doors import is_loopback
from kvferry.trust.errors import PlaintextRefused, TokensInvalid
from kvferry.trust.files import reason_of

TOKEN_VARIABLE: Final = "KVFERRY_TOKEN"  # noqa: S105 - the variable's name

AUTHORIZATION: Final = "authorization"
"""The metadata's key, as in HTTP."""

BEARER: Final = "Bearer "

Metadata = tuple[tuple[str, str], ...] | None

MAX_TOKEN: Final = 4096
"""Characters; ours have 60, and an HTTP header that is much longer is no token."""


class Secret:
    """A text that no repr, log line or traceback shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """For the wire."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


def checked(text: str, where: str) -> Secret:
    """Raises TokensInvalid, whose sentence does not hold the token."""
    text = text.strip()
    if not text or len(text) > MAX_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise TokensInvalid(f"{where} holds no API token: one line of what kvferry tokens add printed")
    return Secret(text)


def read_token(path: Path | None) -> Secret | None:
    """Of the file, else of the environment, if any. Raises TokensInvalid."""
    if path is None:
        given = os.environ.get(TOKEN_VARIABLE, "")
        return checked(given, f"the environment's {TOKEN_VARIABLE}") if given else None
    try:
        return checked(path.read_text(encoding="utf-8"), f"the file {path}")
    except OSError as error:
        raise TokensInvalid(f"the token file {path} cannot be read: {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise TokensInvalid(f"the token file {path} is no text") from error


def metadata_of(token: Secret | None) -> Metadata:
    """What goes with each call."""
    return None if token is None else ((AUTHORIZATION, BEARER + token.reveal()),)


def check_way(addresses: str, *, has_tls: bool, is_allowed: bool) -> None:
    """Raises PlaintextRefused when a token would cross a network in clear."""
    for address in addresses.split(","):
        host, _ = parse_address(address)
        if not (has_tls or is_allowed or is_loopback(host)):
            raise PlaintextRefused(
                f"the API token would go to {host} in clear, for everybody on the way to read: give --tls-dir, or "
                "allow it with --insecure-plaintext"
            )
