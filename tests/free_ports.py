"""Ports for what a test has to name before somebody listens there, or again when it is started anew.

Whoever asks the system for any port, or connects, gets one of a range (net.ipv4.ip_local_port_range, from 32768 on). A
port of that range at which nobody listens for a moment may be another test's in the next one. These lie below it, and
each of pytest's workers has its own.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from typing import Final

_FIRST: Final = 20_000
_N_EACH: Final = 1_500
_N_WORKERS: Final = 8

_begin = _FIRST + _N_EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _N_WORKERS)
_numbers = itertools.count(secrets.randbelow(_N_EACH))  # pytest may run twice on a machine


def free_port() -> int:
    """One at which nobody listens, and that is given to nobody else who asks here."""
    for number in itertools.islice(_numbers, _N_EACH):
        port = _begin + number % _N_EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")
