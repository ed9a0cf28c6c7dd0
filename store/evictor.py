"""Making room in a store directory, and keeping away from what is in use while doing so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from kvferry.store.catalog import Catalog
from kvferry.store.directory import NS_PER_S, StoreDirectory
from kvferry.store.errors import StoreFull
from kvferry.store.heads import Heads
from kvferry.store.pins import Pins
from kvferry.store.space import Budget, RoomPlan, Survey, plan_room

_log = logging.getLogger(__name__)

# A plan is made again when a victim was pinned after it was chosen; each round needs another such coincidence.
_MAX_PLANS = 8

# A node computes what it could not read within 30 s, so nobody reads a file for longer that was marked before.
READ_LEASE_S = 35


class Evictor:
    """Carries out what space.plan_room decides. Any thread may pin; ``make_room`` waits for the disk."""

    def __init__(
        self, directory: StoreDirectory, catalog: Catalog, budget: Budget, trash_grace_s: float, pins: Pins
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._heads = Heads(directory.fs, directory.path)
        self.budget = budget
        self._trash_grace_ns = int(trash_grace_s * NS_PER_S)
        self._pins = pins
        self._lock = threading.Lock()  # guards the next; never held during I/O
        self._n_evicted = 0

    @property
    def n_evicted(self) -> int:
        """Snapshots evicted so far."""
        with self._lock:
            return self._n_evicted

    def pin(self, *names: str) -> AbstractContextManager[None]:
        """Keeps files of this folder from being evicted by this process. Raises SnapshotGone when that is happening
        already."""
        return self._pins.hold([self._path(name) for name in names])

    def make_room(
        self, now_ns: int, shortage_bytes: int, wanted_for: Path, *, by_quota: bool = False
    ) -> tuple[str, ...]:
        """Evicts until the budget holds and ``shortage_bytes`` more of the disk are free; returns the names that went.
        ``by_quota``: the disk refused them although its count of free bytes has room.

        Raises StoreFull when what is pinned or being written, or others' files, leave too little, StoreUnavailable.
        """
        evicted: list[str] = []
        for _ in range(_MAX_PLANS):
            held = self._pins.held()
            survey = self._survey(now_ns)
            pinned = {entry.name for entry in survey.snapshots if self._path(entry.name) in held}
            plan = self._plan(survey, shortage_bytes, pinned, now_ns)
            if plan is None:
                break
            gone = self._carry_out(plan)
            evicted += gone
            if len(gone) == len(plan.evict):
                return tuple(evicted)
        is_disks = shortage_bytes > 0 and not by_quota
        needed_bytes = self._directory.free_bytes() + shortage_bytes if is_disks else 0
        raise StoreFull(
            f"no room for {wanted_for}: {self._why_no_room(shortage_bytes, needed_bytes)}",
            op="make room",
            path=wanted_for,
            needed_bytes=needed_bytes,
        )

    def _plan(self, survey: Survey, shortage_bytes: int, pinned: set[str], now_ns: int) -> RoomPlan | None:
        """Without what other nodes may be reading at this moment, if that is enough. They mark it as used before they
        open it, as long as a turn waits for it at most; their pins are known to nobody else."""
        expired_before_ns = now_ns - self._trash_grace_ns
        plan = plan_room(survey, self.budget, shortage_bytes, set(), expired_before_ns)
        if plan is None or not plan.evict:
            return plan
        standing = self._heads.standing(self._catalog.standing(), [entry.name for entry in survey.snapshots])
        in_use = {entry.name for entry in survey.snapshots if entry.at_ns > now_ns - READ_LEASE_S * NS_PER_S}
        plans = (
            plan_room(survey, self.budget, shortage_bytes, spared, expired_before_ns, standing)
            for spared in (pinned | in_use, pinned)
        )
        return next((plan for plan in plans if plan is not None), None)

    def _survey(self, now_ns: int) -> Survey:
        """The whole store: this folder, and the entries of its neighbours, other models' and tenants', as
        FOLDER/NAME."""
        own = self._directory.survey(now_ns)
        snapshots, trash, quarantined = list(own.snapshots), list(own.trash), list(own.quarantined)
        temp_bytes, n_temps = own.temp_bytes, own.n_temps
        for folder, neighbour in self._directory.neighbours().items():
            there = neighbour.survey(now_ns)
            snapshots += [replace(entry, name=f"{folder}/{entry.name}") for entry in there.snapshots]
            trash += [replace(entry, name=f"{folder}/{entry.name}") for entry in there.trash]
            quarantined += [replace(entry, name=f"{folder}/{entry.name}") for entry in there.quarantined]
            temp_bytes += there.temp_bytes
            n_temps += there.n_temps
        return Survey(tuple(snapshots), tuple(trash), temp_bytes, n_temps, tuple(quarantined))

    def _why_no_room(self, shortage_bytes: int, needed_bytes: int) -> str:
        """Whose limit it is: the disk's, a quota's, or the store's own."""
        if shortage_bytes <= 0:
            return (
                f"everything else in the store's {self.budget.max_bytes} bytes"
                f" and {self.budget.max_files} files is in use"
            )
        if not needed_bytes:
            return f"the disk refuses {shortage_bytes} bytes more, by a quota perhaps; raise it, or make room there"
        return (
            f"its disk has {needed_bytes - shortage_bytes} bytes free, {needed_bytes} are needed, and nothing that the"
            " store may evict makes up for it; remove other files from that disk"
        )

    def free(self, n_bytes: int) -> None:
        """The disk said it is full (or a quota did, which no count of free bytes shows): get rid of as much as is to
        be written.

        Raises StoreFull, StoreUnavailable.
        """
        shortage = n_bytes - self._directory.free_bytes()
        try:
            now_ns = self._directory.now_ns()
        except StoreFull:  # not even an empty file can be made; then every reservation counts
            now_ns = 0
        by_quota = shortage <= 0
        self.make_room(now_ns, n_bytes if by_quota else shortage, self._directory.path, by_quota=by_quota)

    def discard(self, names: Sequence[str]) -> int:
        """Moves files that something else stands for now to the trash; those that are being read stay. How many
        went."""
        gone = self._carry_out(RoomPlan(to_trash=tuple(names)))
        with self._lock:
            self._n_evicted -= len(gone)
        return len(gone)

    def remove(self, name: str, is_continued: Callable[[], bool]) -> bool:
        """Deletes a file of this folder at once and for good; False when it is in use here, or continued by now.

        It is asked before it is taken away, and once more after (directory.py).
        """
        with self._pins.condemn(self._path(name)) as free:
            if not free or is_continued() or not self._directory.delete_unless(name, lambda _: is_continued()):
                return False
            self._catalog.forget(name)
        _log.info("removed %s", self._directory.file(name))
        return True

    def _carry_out(self, plan: RoomPlan) -> list[str]:
        """Removes what the plan says but for what has been pinned since; returns the snapshots that went."""
        every = (*plan.purge, *plan.evict, *plan.release)
        neighbours = self._directory.neighbours() if any("/" in name for name in every) else {}
        neighbours[""] = self._directory
        for name in plan.purge:
            folder, _, own_name = name.rpartition("/")
            if folder in neighbours:
                neighbours[folder].purge(own_name)
        gone = []
        for name in plan.evict:
            folder, _, own_name = name.rpartition("/")
            with self._pins.condemn(self._path(name)) as free:
                if not free:
                    continue
                if not folder:
                    self._catalog.forget(name)
                if folder in neighbours:
                    _take_away(neighbours[folder], own_name, at_once=name in plan.delete)
            gone.append(name)
        for name in plan.release:
            folder, _, own_name = name.rpartition("/")
            if folder in neighbours:
                neighbours[folder].release_quarantined(own_name)
        with self._lock:
            self._n_evicted += len(gone)
        return gone

    def _path(self, name: str) -> Path:
        """Of NAME, or of a neighbour's FOLDER/NAME."""
        return self._directory.path.parent / name if "/" in name else self._directory.path / name


def _take_away(directory: StoreDirectory, name: str, *, at_once: bool) -> None:
    if at_once:
        directory.delete(name)
    else:
        directory.throw_away(name)
    _log.info("evicted %s, of least worth", directory.file(name))
