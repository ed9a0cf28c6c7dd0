"""Deciding what has to go so that a snapshot fits. Pure: what lies in the store comes in, what to remove goes out.

The byte budget holds for everything in the store at once: snapshots, the reservations of files being written (by
any node: the size is part of a temp file's name), and trash. The trash's grace period is a courtesy to readers on
other hosts; the budget is a promise, so under pressure trash goes first, whatever its age, and snapshots evicted for
their bytes are not kept as trash.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

NS_PER_S: Final = 1_000_000_000
# Rows at this depth cost twice as much to compute as the first ones: attention then takes as long as the linear layers.
DEPTH_OF_DOUBLE_COST: Final = 4096
# An age below this is as good as now: a chain's segments are touched one after the other.
AGE_FLOOR_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A file: its name, its bytes, and when it was last used (mtime) or, in the trash, thrown away (ctime); file
    system's time."""

    name: str
    n_bytes: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What a segment's place in its chain says about its worth: positions start..end-1, and the segment before it."""

    start: int
    end: int
    parent: str | None


NO_STANDING: Final[Mapping[str, Standing]] = {}


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in a directory. ``temp_bytes`` and ``n_temps`` include the reservation of the file that room is
    wanted for."""

    snapshots: tuple[Entry, ...]
    trash: tuple[Entry, ...]
    temp_bytes: int
    n_temps: int
    quarantined: tuple[Entry, ...] = ()

    @property
    def n_bytes(self) -> int:
        """All bytes that count against the budget."""
        return sum(entry.n_bytes for entry in (*self.snapshots, *self.trash, *self.quarantined)) + self.temp_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """What a store may hold: all models' folders together."""

    max_bytes: int
    max_files: int


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """What to remove, in this order: trash to purge, snapshots to delete at once, snapshots to move to the trash,
    damaged files to release from quarantine."""

    purge: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    to_trash: tuple[str, ...] = ()
    release: tuple[str, ...] = ()

    @property
    def evict(self) -> tuple[str, ...]:
        """All snapshots that go, least recently used first."""
        return self.delete + self.to_trash


def plan_room(
    survey: Survey,
    budget: Budget,
    shortage_bytes: int,
    protected: AbstractSet[str],
    expired_before_ns: int,
    standing: Mapping[str, Standing] = NO_STANDING,
) -> RoomPlan | None:
    """The least that has to go: oldest trash first, then the snapshots that are worth least and are not protected.

    Worth falls with the time since the last use, and grows with what the rows cost to compute again per byte. No
    segment goes before those that continue it (``standing``). Damaged files, which a person may want to look at, go
    when nothing else can. Trash from before ``expired_before_ns`` goes in any case.

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
    release: list[str] = []
    damaged = sorted(survey.quarantined, key=_age, reverse=True)
    order = _EvictionOrder(survey.snapshots, protected, standing)
    while needed > 0 or surplus_files > 0:
        victim = order.pop()
        if victim is None and damaged and surplus_files <= 0:
            release.append(damaged[-1].name)
            needed -= damaged.pop().n_bytes
            continue
        if victim is None:
            return None
        (delete if needed > 0 else to_trash).append(victim.name)
        needed -= victim.n_bytes if needed > 0 else 0
        surplus_files -= 1
    return RoomPlan(tuple(purge), tuple(delete), tuple(to_trash), tuple(release))


def worth(entry: Entry, newest_ns: int, standing: Standing | None) -> float:
    """Cost per byte of computing the rows again, per second since the last use; no unit, only the order counts."""
    depth = 0.0 if standing is None else (standing.start + standing.end) / 2
    age_s = (newest_ns - entry.at_ns) / NS_PER_S
    return (1 + depth / DEPTH_OF_DOUBLE_COST) / (AGE_FLOOR_S + age_s)


class _EvictionOrder:
    """Snapshots by worth, leaves of their chains first; a parent comes up when its last child has gone."""

    def __init__(
        self, snapshots: tuple[Entry, ...], protected: AbstractSet[str], standing: Mapping[str, Standing]
    ) -> None:
        self._entries = {entry.name: entry for entry in snapshots}
        self._protected = protected
        self._standing = standing
        self._newest_ns = max((entry.at_ns for entry in snapshots), default=0)
        self._n_children: dict[str, int] = {}
        for name in self._entries:
            parent = self._parent(name)
            if parent is not None:
                self._n_children[parent] = self._n_children.get(parent, 0) + 1
        self._heap: list[tuple[float, int, str]] = []
        for name in self._entries:
            self._offer(name)

    def pop(self) -> Entry | None:
        """The next one to go."""
        if not self._heap:
            return None
        *_, name = heapq.heappop(self._heap)
        parent = self._parent(name)
        if parent is not None:
            self._n_children[parent] -= 1
            if parent in self._entries:
                self._offer(parent)
        return self._entries[name]

    def _offer(self, name: str) -> None:
        if name not in self._protected and not self._n_children.get(name):
            entry = self._entries[name]
            value = worth(entry, self._newest_ns, self._standing.get(name))
            heapq.heappush(self._heap, (value, entry.at_ns, name))

    def _parent(self, name: str) -> str | None:
        standing = self._standing.get(name)
        return None if standing is None else standing.parent


def _age(entry: Entry) -> tuple[int, str]:
    return entry.at_ns, entry.name
