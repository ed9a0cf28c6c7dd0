"""HOST:PORT as a person writes it: parsed with the true reason when it cannot be, and tried before gRPC listens there.

gRPC takes a port modulo 65536, and prints why it cannot listen to stderr instead of saying so.
"""

from __future__ import annotations

import errno
import re
import socket
from typing import Final

MAX_PORT: Final = 65_535

_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.%a-z]+\]|[^:/\[\]\s]+):([^:]*)")


def parse_address(value: str, *, to_listen: bool = False) -> tuple[str, int]:
    """HOST:PORT, or [IPV6]:PORT; port 0 only ``to_listen``, where it takes a free one. ValueError with the reason."""
    match = _ADDRESS.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not HOST:PORT")
    host, port = match.groups()
    if not (port.isascii() and port.isdigit()):
        raise ValueError(f"{value!r} is not HOST:PORT: {port!r} is no port number")
    lowest = 0 if to_listen else 1
    if len(port) > len(str(MAX_PORT)) or not lowest <= int(port) <= MAX_PORT:
        raise ValueError(f"{value!r} has port {port}: a port lies between {lowest} and {MAX_PORT}")
    return host, int(port)


def why_not_listen(address: str) -> str | None:
    """Why nobody can listen at a parsed address, and what to do; None when one can. Another program may still be
    faster."""
    host, port = parse_address(address, to_listen=True)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: closed connections do not count
            probe.bind(where)
            probe.listen()
    except (socket.gaierror, UnicodeError):  # the second for names that no resolver may be asked for
        return f"the host name {host} is not known; give an address of this machine with --listen"
    except OSError as error:
        return _advice(error, host)
    return None


def _advice(error: OSError, host: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return "address already in use; stop what uses it, or give another --listen"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; give one that is with --listen"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return "permission denied, as for most users below port 1024; give a higher port with --listen"
    return f"{(error.strerror or str(error)).lower()}; give another --listen"
