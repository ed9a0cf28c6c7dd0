"""Counts what a process lives through rarely, and an operator wants to know: any part calls ``count`` from any thread.

The names are those of docs/metrics.md; each is there from the start, with 0, so that a monitor sees the first one.
"""

from __future__ import annotations

import threading
from typing import Literal, get_args

Event = Literal["watchdog_missed", "compile_cache_healed"]

_lock = threading.Lock()
_counts: dict[str, int] = dict.fromkeys(get_args(Event), 0)


def count(event: Event) -> None:
    """One more."""
    with _lock:
        _counts[event] += 1


def counts() -> dict[str, float]:
    """Of each, since the process started."""
    with _lock:
        return {name: float(n) for name, n in _counts.items()}
