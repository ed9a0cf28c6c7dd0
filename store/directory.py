"""One model's directory in a store: its listing, its temporary files, its trash. All times are the file system's own.

A directory is optimistic: nothing is created before something is written, and a missing one is an empty one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.store import names
from kvferry.store.errors import StoreFull, os_errors_mapped
from kvferry.store.fs import FileSystem
from kvferry.store.publish import TempFile, create_temp, sync_directory
from kvferry.store.reader import Identity
from kvferry.store.space import Entry, Survey

NS_PER_S: Final = 1_000_000_000
# A temp file untouched for this long is nobody's save in progress: its reservation no longer counts, only what it
# really holds.
IN_FLIGHT_S: Final = 900
# A foreign node's temp file is taken away after this long; its own node does it at its next start.
FOREIGN_TEMP_S: Final = 24 * 3600
# Longer than the longest read: 8,192 tokens of the 30B model are 1.6 GB, 15 s over gigabit ethernet.
TRASH_GRACE_S: Final = 120
# Damaged files kept for a person; enough to see a pattern, and they count against the budget.
QUARANTINED_MOST: Final = 16


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What was left behind and has been taken away."""

    n_own_temps: int = 0
    n_foreign_temps: int = 0
    n_trashed: int = 0


class StoreDirectory:
    """Operations on ROOT/<fingerprint>. No state of its own but names, so any thread may use it. Raises the store's
    errors only."""

    def __init__(self, fs: FileSystem, root: Path, fingerprint: str, node_id: str, unique: Callable[[], str]) -> None:
        self.fs = fs
        self.path = root / names.check_fingerprint(fingerprint)
        self.node_id = names.check_node_id(node_id)
        self._unique = unique
        self._trash = self.path / names.TRASH
        self._quarantine = self.path / names.QUARANTINE

    def file(self, name: str) -> Path:
        """Where a snapshot lies. Raises SnapshotRejected(bad_name)."""
        return self.path / names.check_snapshot(name)

    def make(self) -> None:
        """Makes the directory and its trash, durably: what is saved in it is lost with its name."""
        with os_errors_mapped("make directory", self._trash):
            self.fs.make_directories(str(self.path))
            self.fs.make_directories(str(self._trash))
        sync_directory(self.fs, self.path.parent)

    def exists(self) -> bool:
        """Whether anything was ever written here."""
        return self._status(self.path) is not None

    def snapshot_names(self) -> set[str]:
        """Entries named as snapshots; others are ignored."""
        return {name for name in self._names(self.path) if names.is_snapshot(name)}

    def identity(self, name: str) -> Identity | None:
        """What the name stands for at present, asked by the exact name (listings of network file systems are stale)."""
        status = self._status(self.file(name))
        return None if status is None else _identity(status)

    @contextmanager
    def temp(self, target: str, reserved_bytes: int) -> Iterator[TempFile]:
        """A new temporary file for ``target``, which reserves its bytes by its name; makes the directory when it is
        missing."""
        path = self.path / names.temp_name(target, self.node_id, self._unique(), reserved_bytes)
        if not self.exists():
            self.make()
        with create_temp(self.fs, path) as temp:
            yield temp

    def now_ns(self) -> int:
        """The file system's time: the mtime of a file made for the purpose."""
        with create_temp(self.fs, self.path / names.clock_name(self.node_id, self._unique())) as clock:
            return clock.created_at_ns()

    def survey(self, now_ns: int) -> Survey:
        """Everything in the directory that counts against a budget. Entries that vanish meanwhile do not count.

        A file being published never escapes: listed twice, because one that gets its final name during one listing may
        be in it under neither; and a temp file that is gone when it is looked at is asked for by its final name.
        """
        snapshots: dict[str, Entry] = {}
        temp_bytes = n_temps = 0
        for name in sorted({*self._names(self.path), *self._names(self.path)}):
            temp = names.parse_temp(name)
            if temp is not None and (entry := self._entry(self.path / name, by_change=False)) is not None:
                in_flight = now_ns - entry.at_ns < IN_FLIGHT_S * NS_PER_S
                temp_bytes += max(entry.n_bytes, temp.reserved_bytes) if in_flight else entry.n_bytes
                n_temps += in_flight and temp.reserved_bytes > 0
                continue
            final = name if temp is None else temp.target
            if names.is_snapshot(final) and (entry := self._entry(self.path / final, by_change=False)) is not None:
                snapshots[final] = entry
        return Survey(tuple(snapshots.values()), tuple(self._trashed()), temp_bytes, n_temps, tuple(self.quarantined()))

    def neighbours(self) -> dict[str, StoreDirectory]:
        """The other models' folders in the same store, by name."""
        root = self.path.parent
        found = {}
        for name in self._names(root):
            if name == self.path.name or not names.is_fingerprint(name):
                continue
            status = self._status(root / name)
            if status is not None and stat.S_ISDIR(status.st_mode):
                found[name] = StoreDirectory(self.fs, root, name, self.node_id, self._unique)
        return found

    def free_bytes(self) -> int:
        """Bytes the disk still takes."""
        with os_errors_mapped("measure", self.path):
            return self.fs.free_bytes(str(self.path))

    def touch(self, name: str) -> None:
        """Marks a snapshot as used now. A file system that will not is left alone: it costs an eviction out of order,
        nothing else."""
        with suppress(OSError):
            self.fs.touch(str(self.file(name)))

    def throw_away(self, name: str) -> None:
        """Moves a snapshot to the trash, where whoever is reading it can finish. A vanished one is no error."""
        try:
            self._move_to_trash(name, self._trash / names.trash_name(name, self._unique()))
        except StoreFull:  # the trash folder itself has no room for another entry
            self.delete(name)

    def quarantine(self, name: str, judged: Identity | None = None) -> Path | None:
        """Moves a damaged file out of the way, for a person to look at; None when it is gone already.

        ``judged``: the file that is meant. Another one that has its name by now, saved again by whoever found the
        damage first, stays.
        """
        found = self.identity(name)
        if found is None or (judged is not None and found.is_of_another_file(judged)):
            return None
        target = self._quarantine / names.trash_name(name, self._unique())
        with os_errors_mapped("move to quarantine", self.file(name)):
            self.fs.make_directories(str(self._quarantine))
            if not self._rename(self.file(name), target):
                return None
        kept = sorted(self.quarantined(), key=lambda entry: -entry.at_ns)
        for entry in kept[QUARANTINED_MOST:]:
            self.release_quarantined(entry.name)
        return target

    def quarantined(self) -> Iterator[Entry]:
        """What lies in the quarantine."""
        for name in self._names(self._quarantine):
            if names.is_trashed(name):
                entry = self._entry(self._quarantine / name, by_change=True)
                if entry is not None:
                    yield entry

    def release_quarantined(self, name: str) -> None:
        """Unlinks an entry of the quarantine."""
        if names.is_trashed(name):
            self._unlink(self._quarantine / name)

    def delete(self, name: str) -> None:
        """Unlinks a snapshot at once. A vanished one is no error."""
        self._unlink(self.file(name))

    def delete_unless(self, name: str, is_needed: Callable[[Identity], bool]) -> bool:
        """Unlinks a snapshot, but takes it out of everybody's reach first, and then asks: False when it is needed.

        There are no locks. Who used it or continued it before is seen by ``is_needed``, which is given the file as it
        is by now. Who wants to after that finds it gone; whose continuation is half written saves an orphan. What is
        needed has its name again, unless it was saved anew meanwhile. Where a rename is a copy, it is unlinked at once.
        Raises StoreUnavailable, and what ``is_needed`` raises; then it is as it was.
        """
        if not self.fs.has_renames:
            self.delete(name)
            return True
        trashed = self._trash / names.trash_name(name, self._unique())
        try:
            if not self._move_to_trash(name, trashed):
                return True
        except StoreFull:  # the trash folder itself has no room for another entry
            self.delete(name)
            return True
        needed = True
        try:
            status = self._status(trashed)
            needed = status is not None and is_needed(_identity(status))
        finally:
            if needed:
                self._put_back(trashed, name)
        self._unlink(trashed)
        return not needed

    def _move_to_trash(self, name: str, trashed: Path) -> bool:
        """False for what has vanished."""
        with os_errors_mapped("move to trash", self.file(name)):
            if self._rename(self.file(name), trashed):
                return True
            self.make()
            return self._rename(self.file(name), trashed)

    def _put_back(self, trashed: Path, name: str) -> None:
        """What another node saved under the name since stays; what comes in between is the same, and is replaced."""
        if self._status(self.file(name)) is None:
            with os_errors_mapped("put back", self.file(name)):
                self._rename(trashed, self.file(name))

    def purge(self, trashed_name: str) -> None:
        """Unlinks an entry of the trash. A vanished one is no error."""
        if names.is_trashed(trashed_name):
            self._unlink(self._trash / trashed_name)

    def purge_expired(self, now_ns: int, grace_s: float) -> int:
        """Unlinks trash older than the grace period; returns how many."""
        expired = [entry.name for entry in self._trashed() if now_ns - entry.at_ns > grace_s * NS_PER_S]
        for name in expired:
            self.purge(name)
        return len(expired)

    def reap(self, grace_s: float) -> ReapReport:
        """Takes away what a crash left: this node's temps, foreign ones older than a day, expired trash. Only at a
        node's start."""
        self.make()
        now_ns = self.now_ns()
        n_own = n_foreign = 0
        for name in self._names(self.path):
            temp = names.parse_temp(name)
            if temp is None:
                continue
            if temp.node_id == self.node_id:
                self._unlink(self.path / name)
                n_own += 1
                continue
            entry = self._entry(self.path / name, by_change=False)
            if entry is not None and now_ns - entry.at_ns > FOREIGN_TEMP_S * NS_PER_S:
                self._unlink(self.path / name)
                n_foreign += 1
        return ReapReport(n_own, n_foreign, self.purge_expired(now_ns, grace_s))

    def _trashed(self) -> Iterator[Entry]:
        for name in self._names(self._trash):
            if names.is_trashed(name):
                # a rename leaves the mtime as it was, but changes the ctime
                entry = self._entry(self._trash / name, by_change=True)
                if entry is not None:
                    yield entry

    def _names(self, directory: Path) -> list[str]:
        with os_errors_mapped("list", directory):
            try:
                return self.fs.names(str(directory))
            except FileNotFoundError:
                return []

    def _entry(self, path: Path, *, by_change: bool) -> Entry | None:
        status = self._status(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return Entry(path.name, status.st_size, status.st_ctime_ns if by_change else status.st_mtime_ns)

    def _status(self, path: Path) -> os.stat_result | None:
        with os_errors_mapped("look at", path):
            try:
                return self.fs.lstat(str(path))
            except FileNotFoundError:
                return None

    def _rename(self, source: Path, target: Path) -> bool:
        """False when source or the target's folder is missing."""
        try:
            self.fs.rename(str(source), str(target))
        except FileNotFoundError:
            return False
        return True

    def _unlink(self, path: Path) -> None:
        with os_errors_mapped("remove", path), suppress(FileNotFoundError):
            self.fs.unlink(str(path))


def _identity(status: os.stat_result) -> Identity:
    return Identity(status.st_ino, status.st_size, status.st_mtime_ns)
