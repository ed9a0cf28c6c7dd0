"""A service manager's end of the notify socket, for tests: a real datagram socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


class ListeningManager:
    """What a process said, datagram by datagram. `environment` makes a process talk to it."""

    def __init__(self, folder: Path, watchdog_seconds: float | None = None) -> None:
        path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.environment = {"NOTIFY_SOCKET": str(path)}
        if watchdog_seconds is not None:
            self.environment["WATCHDOG_USEC"] = str(int(watchdog_seconds * 1e6))
        self.heard: list[dict[str, str]] = []

    def listen(self) -> list[dict[str, str]]:
        """What came since the last time; all of it is in `heard`."""
        came = []
        while True:
            try:
                lines = self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                self.heard += came
                return came
            came.append(dict(line.split("=", 1) for line in lines))

    def wait_for(self, wanted: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """The next datagram of that kind."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for datagram in self.listen():
                if wanted(datagram):
                    return datagram
            time.sleep(0.02)
        raise AssertionError(f"not heard within {seconds} s; heard: {self.heard}")

    def is_fed_during(self, seconds: float) -> bool:
        """Whether a sign of life comes in that time."""
        self.listen()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if any("WATCHDOG" in datagram for datagram in self.listen()):
                return True
            time.sleep(0.02)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
