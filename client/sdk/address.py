"""HOST:PORT, checked before gRPC sees it: gRPC takes a port modulo 65536 and fails on nonsense in its own words."""

from __future__ import annotations

import re
from typing import Final

from kvferry.client.errors import InvalidAddress

PORT_MAX: Final = 65_535

_HOST_PORT: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):(?P<port>[0-9]+)", re.ASCII)


def check_address(address: str) -> str:
    """`address` itself. Raises InvalidAddress unless it is HOST:PORT, or [IPV6]:PORT, with a port from 1 to 65535."""
    found = _HOST_PORT.fullmatch(address)
    if found is None:
        raise InvalidAddress(f"The coordinator's address {address!r} is not HOST:PORT, such as 127.0.0.1:7070.")
    port = found["port"]
    if not 1 <= int(port[-6:] if len(port.lstrip("0")) <= 5 else PORT_MAX + 1) <= PORT_MAX:
        raise InvalidAddress(f"The coordinator's address {address!r} has a port that is not from 1 to {PORT_MAX}.")
    return address
