"""What a store has done since it was made: counted by whoever does it, told to whoever asks."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, fields
from typing import Final

from kvferry.store.errors import StoreFull, WriteBudgetSpent

_COUNTED: Final = (
    "n_published",
    "n_already_there",
    "n_failed_saves",
    "n_without_room",
    "n_over_write_budget",
    "n_restored",
    "n_failed_restores",
    "bytes_written",
    "bytes_read",
    "n_quarantined",
)


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts since the start. ``n_failed_saves`` include those without room and those over the budget of bytes per
    hour, of which ``write_budget_left`` tells what is left; ``n_refused`` files are refused now, ``n_refusals`` were at
    any time; ``bytes_written`` include those of merged segments."""

    n_known: int
    n_refused: int
    n_refusals: int
    n_published: int
    n_already_there: int
    n_failed_saves: int
    n_without_room: int
    n_over_write_budget: int
    n_restored: int
    n_failed_restores: int
    n_evicted: int
    bytes_written: int
    bytes_read: int
    n_quarantined: int
    n_orphans: int
    write_budget_left: int | None

    def __add__(self, other: StoreStatistics) -> StoreStatistics:
        """Of two stores that write within one budget."""
        counts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "write_budget_left"}
        sums = {name: n + getattr(other, name) for name, n in counts.items()}
        return StoreStatistics(**sums, write_budget_left=self.write_budget_left)


class StoreCounts:
    """The counts that no other part keeps. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))

    def add(self, **increments: int) -> None:
        """Increments by the names of StoreStatistics' fields."""
        with self._lock:
            self._counts.update(increments)

    def add_failed_save(self, error: Exception) -> None:
        """A save that came to nothing, and why."""
        over_budget = isinstance(error, WriteBudgetSpent)
        without_room = isinstance(error, StoreFull) and not over_budget
        self.add(n_failed_saves=1, n_without_room=without_room, n_over_write_budget=over_budget)

    def so_far(self) -> dict[str, int]:
        """All of them by name."""
        with self._lock:
            return dict(self._counts)
