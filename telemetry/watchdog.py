"""A thread that looks whether the process gets on, and tells the service manager so for as long as it does.

What is looked at is when the work itself last came around (the engine's steps, the event loop), never a thread that
lives for this alone: a process whose engine hangs is not fed, and the manager starts it anew.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from kvferry.telemetry import events
from kvferry.telemetry.service_manager import ServiceManager

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""Between looks at most."""

PATIENCE_SECONDS: Final = 15.0
"""What hangs when no manager says how long that is."""

Check = Callable[[float, float], str]
"""Given the monotonic time and the patience, both in seconds: what hangs, or nothing."""


def loop_check(beat_at: Callable[[], float]) -> Check:
    """Whether an event loop comes around, which it does many times a second. `beat_at`: when it last did."""

    def check(now: float, patience: float) -> str:
        silent = now - beat_at()
        return f"the event loop has not come around for {silent:.0f} s" if silent > patience else ""

    return check


class Watchdog:
    """`describe` says how the service is, for people; `on_change` is told what hangs, and nothing once it goes on.

    Both are called in the watchdog's thread.
    """

    def __init__(
        self,
        manager: ServiceManager,
        checks: Sequence[Check],
        describe: Callable[[], str],
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        watched = manager.watchdog_seconds
        self._manager = manager
        self._checks = checks
        self._describe = describe
        self._on_change = on_change
        # Fed four times in the manager's interval: one late look is no reason to end a process.
        self._look_seconds = LOOK_SECONDS if watched is None else min(LOOK_SECONDS, watched / 4)
        self._patience = PATIENCE_SECONDS if watched is None else watched / 2
        self._trouble = ""
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-watchdog", daemon=True)

    def start(self) -> None:
        """Begin. A process that its manager may abort says where each thread is then."""
        if self._manager.watchdog_seconds is not None:
            faulthandler.enable()
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a watchdog that was not started is stopped as well."""
        self._enough.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._enough.wait(self._look_seconds):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        trouble = "; ".join(found for check in self._checks if (found := check(now, self._patience)))
        if trouble != self._trouble:
            self._changed(trouble)
        if not trouble:
            self._manager.alive(self._describe())

    def _changed(self, trouble: str) -> None:
        if trouble:
            log.error("%s; no sign of life is given until it goes on", trouble)
            self._manager.hanging(trouble)
            events.count("watchdog_missed")
        else:
            log.warning("what hung goes on")
        self._trouble = trouble
        self._on_change(trouble)
