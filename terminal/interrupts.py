"""What asks a long-running command to end in order: SIGTERM, Ctrl-C, and a terminal that is closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP, which a closed terminal sends; not under nohup, which has it ignored."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hangs_up else ()))


def means_at_once(number: int) -> bool:
    """Whether a signal that comes while a command stops already means that it must not take that time.

    A SIGHUP does not: one closed terminal sends several, the kernel's and the shell's.
    """
    return number != signal.SIGHUP


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """What asks to stop raises KeyboardInterrupt, each time that it means something. Of the main thread."""
    asked = False

    def interrupt(number: int, _frame: object) -> None:
        nonlocal asked
        if asked and not means_at_once(number):
            return
        asked = True
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def closed_terminal_ignored() -> Iterator[None]:
    """For what stops already, for whatever reason: a SIGHUP that comes meanwhile is no wish for haste."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
