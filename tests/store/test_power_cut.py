"""Promise 2: a power cut after "saved" loses nothing, and before it no wrong row is ever read.

The disk forgets what was not synced: a file's bytes until fsync, a directory's entries until the directory's fsync.
At the cut any leading part of the pending entries may have reached the disk, and un-synced bytes may be there,
missing, or zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvferry.store.errors import StoreError
from kvferry.store.fs import Buffer, PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(2, 2, 4)
OLD, NEW = np.arange(1, 41), np.arange(100, 140)

Entries = dict[str, int]  # name -> inode


class PowerCutError(BaseException):
    """Not an Exception: no handler of the store may take it for a failed call."""


class ForgetfulFileSystem(PosixFileSystem):
    """Knows at every moment what a power cut would leave. ``cut_after`` calls that change something, the power goes."""

    def __init__(self, shadow: Path, cut_after: int | None = None) -> None:
        self.shadow = shadow
        self.left = cut_after
        self.n_changes = 0
        self.synced: dict[int, bytes] = {}
        self.durable: Entries = {}
        self.pending: list[Callable[[Entries], object]] = []

    def _changed(self) -> None:
        self.n_changes += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise PowerCutError

    def _inode(self, path: str) -> int:
        return os.lstat(path).st_ino

    def create(self, path: str) -> int:
        self._changed()
        fd = super().create(path)
        inode, name = os.fstat(fd).st_ino, Path(path).name
        os.link(path, self.shadow / str(inode))
        self.pending.append(lambda entries: entries.__setitem__(name, inode))
        return fd

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        self._changed()
        return super().writev(fd, buffers)

    def fsync(self, fd: int) -> None:
        self._changed()
        inode = os.fstat(fd).st_ino
        self.synced[inode] = (self.shadow / str(inode)).read_bytes()

    def fsync_directory(self, directory: str) -> None:
        self._changed()
        for change in self.pending:
            change(self.durable)
        self.pending.clear()

    def link(self, source: str, target: str) -> None:
        self._changed()
        inode, name = self._inode(source), Path(target).name
        super().link(source, target)
        self.pending.append(lambda entries: entries.__setitem__(name, inode))

    def unlink(self, path: str) -> None:
        self._changed()
        super().unlink(path)
        name = Path(path).name
        self.pending.append(lambda entries: entries.pop(name, None))

    def rename(self, source: str, target: str) -> None:
        self._changed()
        inode = self._inode(source)
        super().rename(source, target)
        gone, name = Path(source).name, Path(target).name
        self.pending.append(lambda entries: (entries.pop(gone, None), entries.__setitem__(name, inode)))


FATES: dict[str, Callable[[bytes], bytes]] = {
    "all there": lambda data: data,
    "nothing there": lambda data: b"",
    "half there": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "header and ids there, rows zero": lambda data: data[:224] + bytes(len(data[224:])),
    "all but the last bytes there": lambda data: data[:-30] + bytes(30),
}


def _rows(value: int) -> MemoryRows:
    rows = MemoryRows.empty(GEOMETRY, 40)
    rows.k[:], rows.v[:] = value, -value
    return rows


def _open(root: Path, fs: PosixFileSystem | None = None, version: Literal[1, 3] = 1) -> SnapshotStore:
    return SnapshotStore(root, "feed", GEOMETRY, 1024, 1 << 20, 10, "node-1", fs=fs, version=version)


def _after_the_cut(
    root: Path, disk: ForgetfulFileSystem, n_survivors: int, fate: Callable[[bytes], bytes]
) -> SnapshotStore:
    """The directory as the next start finds it."""
    entries = dict(disk.durable)
    for change in disk.pending[:n_survivors]:
        change(entries)
    folder = root / "feed"
    (folder / "trash").mkdir(parents=True)
    for name, inode in entries.items():
        written = (disk.shadow / str(inode)).read_bytes()
        (folder / name).write_bytes(disk.synced.get(inode, fate(written)))
    store = _open(root)
    store.reap()
    store.refresh()
    return store


def _holds(store: SnapshotStore, ids: np.ndarray, value: int) -> bool:
    """Whether the store gives rows for these ids; if it does, they are the right ones."""
    match = store.find(ids)
    if match is None:
        return False
    rows = MemoryRows.empty(GEOMETRY, 40)
    try:
        store.restore(match, match.n_common, rows)
    except StoreError:
        return False
    assert (rows.k == value).all()
    assert (rows.v == -value).all()
    return True


@pytest.mark.parametrize("links", [True, False], ids=["published-by-link", "published-by-rename"])
def test_a_power_cut_at_every_instant_of_a_save(tmp_path: Path, links: bool) -> None:
    class Disk(ForgetfulFileSystem):
        def link(self, source: str, target: str) -> None:
            if not links:
                raise OSError(95, "not supported")
            super().link(source, target)

    n_cases = n_cut = 0
    for cut_after in range(40):
        work = tmp_path / str(cut_after)
        (work / "shadow").mkdir(parents=True)
        disk = Disk(work / "shadow")
        store = _open(work / "store", disk)
        store.reap()
        store.publish(OLD, _rows(1))
        disk.left = cut_after
        saved = False
        try:
            store.publish(NEW, _rows(2))
            saved = True
        except PowerCutError:
            n_cut += 1
        disk.left = None
        for n_survivors in range(len(disk.pending) + 1):
            for fate in FATES.values():
                n_cases += 1
                found = _after_the_cut(work / f"{n_cases}", disk, n_survivors, fate)
                assert _holds(found, OLD, 1)
                assert _holds(found, NEW, 2) or not saved
                assert not list(found.path.glob("*.tmp"))
        if saved:
            break
    assert n_cut > 5
    assert n_cases > 80


def _rows_of_a_session() -> MemoryRows:
    rows = MemoryRows.empty(GEOMETRY, 80)
    rows.k[:] = np.arange(80)[None, :, None]
    rows.v[:] = -rows.k
    return rows


def _n_good_rows(store: SnapshotStore, ids: np.ndarray) -> int:
    match = store.find(ids)
    if match is None:
        return 0
    rows, wanted = MemoryRows.empty(GEOMETRY, 80), _rows_of_a_session()
    try:
        n = store.restore_usable(match, match.n_common, rows)
    except StoreError:
        return 0
    assert np.array_equal(rows.k[:, :n], wanted.k[:, :n])
    assert np.array_equal(rows.v[:, :n], wanted.v[:, :n])
    return n


def test_a_power_cut_at_every_instant_of_a_turns_segment(tmp_path: Path) -> None:
    """The segment before it stays; the new one is whole or not there, or its damage is found."""
    ids = np.arange(1, 81)
    n_cases = n_cut = 0
    for cut_after in range(40):
        work = tmp_path / str(cut_after)
        (work / "shadow").mkdir(parents=True)
        disk = ForgetfulFileSystem(work / "shadow")
        store = _open(work / "store", disk, version=3)
        store.reap()
        store.publish(ids[:40], _rows_of_a_session())
        disk.left = cut_after
        saved = False
        try:
            assert store.publish(ids, _rows_of_a_session()).start == 40
            saved = True
        except PowerCutError:
            n_cut += 1
        disk.left = None
        for n_survivors in range(len(disk.pending) + 1):
            for fate in FATES.values():
                n_cases += 1
                found = _after_the_cut(work / f"{n_cases}", disk, n_survivors, fate)
                n_good = _n_good_rows(found, ids)
                assert n_good == 80 if saved else 40 <= n_good <= 80
        if saved:
            break
    assert n_cut > 5
    assert n_cases > 80
