"""How late the machine itself is: what a bound on somebody's delays has to allow for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def machine_noise() -> Iterator[list[float]]:
    """How late a thread that only sleeps wakes meanwhile, in seconds, in order of length when it is over: whatever
    else the machine has to do is not the fault of those who are measured."""
    lags: list[float] = [0.0]
    ended = threading.Event()

    def measure() -> None:
        while not ended.is_set():
            due = time.monotonic() + 0.005
            time.sleep(0.005)
            lags.append(time.monotonic() - due)

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield lags
    finally:
        ended.set()
        thread.join()
        lags.sort()
