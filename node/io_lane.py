"""One thread with a queue whose work may hang at any call: it shows whether it gets on, and nobody ever waits for it
without a deadline."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

log = logging.getLogger(__name__)

Request = TypeVar("Request")

PROBE_SECONDS: Final = 2.0
"""How often an idle thread looks whether a store that failed is back: well within 5 s (reliability.md, promise 12)."""


@dataclass(slots=True)
class _Progress:
    """When the thread last got anywhere; written by it, read by all."""

    working_on: str = ""  # empty: idle
    at: float = 0.0


class IoLane(Generic[Request]):
    """Serves requests one after the other. The thread is a daemon: a hung call must not keep the process alive.

    `open` runs first, `serve` for each request, `probe` every PROBE_SECONDS without one: all three on the lane's
    thread, and each shows with `working` and `tell` that it gets on. All else may be called by any thread.
    """

    def __init__(
        self,
        name: str,
        *,
        open_first: Callable[[], None],
        serve: Callable[[Request], None],
        probe: Callable[[], None],
        stall_seconds: float,
    ) -> None:
        self.opened = threading.Event()
        self.waiting: deque[Request] = deque()  # guarded by `lock`
        self.lock = threading.Condition()
        self._open_first = open_first
        self._serve = serve
        self._probe = probe
        self._stall_seconds = stall_seconds
        self._closing = False
        self._progress = _Progress()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin with `open_first`."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        with self.lock:
            self.waiting.append(request)
            self.lock.notify()

    def end(self) -> None:
        """Let the running request and those that wait end."""
        with self.lock:
            self._closing = True
            self.lock.notify()

    def join(self, timeout: float) -> bool:
        """False when it has not ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stalled_on(self) -> tuple[str, float] | None:
        """What the running call does and for how many seconds it has shown no progress, when that is too long."""
        progress = self._progress
        seconds = time.monotonic() - progress.at
        return (progress.working_on, seconds) if progress.working_on and seconds > self._stall_seconds else None

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[float]:
        """Around whatever may hang; yields the time at which it began, monotonic seconds."""
        now = time.monotonic()
        self._progress = _Progress(working_on=what, at=now)
        try:
            yield now
        finally:
            self._progress = _Progress()

    def tell(self) -> None:
        """The call gets on."""
        self._progress.at = time.monotonic()

    def _run(self) -> None:
        self._open_first()
        self.opened.set()
        while True:
            request = self._next()
            if request is not None:
                self._serve(request)
            elif self._closing:
                return
            else:
                self._probe()

    def _next(self) -> Request | None:
        with self.lock:
            if not (self.waiting or self._closing):
                self.lock.wait(PROBE_SECONDS)
            return self.waiting.popleft() if self.waiting else None
