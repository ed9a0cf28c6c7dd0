"""Deciding what has to go so that a snapshot fits. Pure: what lies in the directory comes in, what to remove goes out.

The byte budget holds for everything in the directory at once: snapshots, the reservations of files being written (by
any node: the size is part of a temp file's name), and trash. The trash's grace period is a courtesy to readers on
other hosts; the budget is a promise, so under pressure trash goes first, whatever its age, and snapshots evicted for
their bytes are not kept as trash.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A file: its name, its bytes, and when it was last used (mtime) or, in the trash, thrown away (ctime); file
    system's time."""

    name: str
    n_bytes: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in a directory. ``temp_bytes`` and ``n_temps`` include the reservation of the file that room is
    wanted for."""

    snapshots: tuple[Entry, ...]
    trash: tuple[Entry, ...]
    temp_bytes: int
    n_temps: int

    @property
    def n_bytes(self) -> int:
        """All bytes that count against the budget."""
        return sum(entry.n_bytes for entry in (*self.snapshots, *self.trash)) + self.temp_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """What a store directory may hold."""

    max_bytes: int
    max_files: int


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """What to remove, in this order: trash to purge, snapshots to delete at once, snapshots to move to the trash."""

    purge: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    to_trash: tuple[str, ...] = ()

    @property
    def evict(self) -> tuple[str, ...]:
        """All snapshots that go, least recently used first."""
        return self.delete + self.to_trash


def plan_room(
    survey: Survey, budget: Budget, shortage_bytes: int, protected: AbstractSet[str], expired_before_ns: int
) -> RoomPlan | None:
    """The least that has to go: oldest trash first, then the least recently used snapshots that are not protected.

    Trash from before ``expired_before_ns`` goes in any case.

    ``shortage_bytes`` is what the disk itself lacks, however generous the budget. None when it cannot be done; then
    nothing should go.
    """
    needed = max(survey.n_bytes - budget.max_bytes, shortage_bytes, 0)
    surplus_files = len(survey.snapshots) + survey.n_temps - budget.max_files
    purge: list[str] = []
    for entry in sorted(survey.trash, key=_age):
        if needed <= 0 and entry.at_ns >= expired_before_ns:
            break
        purge.append(entry.name)
        needed -= entry.n_bytes
    delete: list[str] = []
    to_trash: list[str] = []
    for entry in sorted(survey.snapshots, key=_age):
        if needed <= 0 and surplus_files <= 0:
            break
        if entry.name in protected:
            continue
        (delete if needed > 0 else to_trash).append(entry.name)
        needed -= entry.n_bytes if needed > 0 else 0
        surplus_files -= 1
    if needed > 0 or surplus_files > 0:
        return None
    return RoomPlan(tuple(purge), tuple(delete), tuple(to_trash))


def _age(entry: Entry) -> tuple[int, str]:
    return entry.at_ns, entry.name
