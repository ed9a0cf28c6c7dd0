"""What a process tells the service manager that started it: systemd's notify protocol, sd_notify(3).

One datagram of NAME=VALUE lines goes to the socket that $NOTIFY_SOCKET names. Written here, as that is all of it, and
the library of that purpose (sdnotify) has had no release since 2017. Without the variable nothing is sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

SEND_SECONDS: Final = 1.0
"""The manager reads at once; should its queue be full for so long, a message is lost rather than a token late."""


class ServiceManager:
    """Any thread may call it. Nothing here raises: a service serves whether its manager listens or not."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        # "@": a name in the abstract namespace. Anything else is no Unix socket (a virtual machine's vsock).
        self._address = name if name.startswith("/") else "\0" + name[1:] if name.startswith("@") else ""
        self._send_lock = threading.Lock()
        self._status = ""
        self.watchdog_seconds: Final = _watchdog_seconds(environment) if self._address else None

    def starting(self, status: str, seconds: float) -> None:
        """A step of the start begins; it may take so long, whatever is left of the start's own time."""
        self._tell(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={_usec(seconds)}")

    def ready(self, status: str) -> None:
        """It serves."""
        self._tell("READY=1", f"STATUS={status}")

    def alive(self, status: str) -> None:
        """It gets on: sent more often than every `watchdog_seconds`, or the manager ends the process."""
        self._tell("WATCHDOG=1", *([] if status == self._status else [f"STATUS={status}"]))
        self._status = status

    def hanging(self, status: str) -> None:
        """It does not get on; why."""
        self._tell(f"STATUS={status}")
        self._status = status

    def stopping(self, status: str, seconds: float) -> None:
        """It was told to end; what it does before may take so long, whatever the stop's own time is."""
        self._tell("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={_usec(seconds)}")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        datagram = "\n".join(line.replace("\n", " ") for line in lines).encode()
        try:
            with self._send_lock, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_SECONDS)
                sender.sendto(datagram, self._address)
        except OSError as error:
            log.warning("the service manager could not be told %s: %s", lines[0], error)


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """How often this process has to show that it gets on; None when nobody watches."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # meant for a process that started this one
    with contextlib.suppress(ValueError):
        return int(environment.get("WATCHDOG_USEC", "")) / 1e6 or None
    return None


def _usec(seconds: float) -> int:
    return int(seconds * 1e6)
