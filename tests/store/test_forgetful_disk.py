"""Promise 2: a disk that forgets what was not synced, and a power cut after each call.

The calls are those that the kernel passed on to a FUSE disk while a process saved twice; where there is no FUSE, those
that the store made. After each of them the power goes, fifty
times with other luck: of the un-synced writes of a file some are there, the others zeros or beyond its end; of a
folder's un-synced entries the first few are there.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.store.errors import StoreError
from kvferry.store.fs import Buffer, PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

from .save_twice import save_twice

DISK = Path(__file__).with_name("forgetful_disk.py")
WRITER = Path(__file__).with_name("save_twice.py")
SOURCES = Path(__file__).parents[2] / "src"
UNMOUNT = shutil.which("fusermount") or shutil.which("fusermount3")
GEOMETRY = KvGeometry(2, 2, 4)
IDS = np.arange(1, 81)
N_SEEDS = 50

Note = tuple[Any, ...]


def _has_fuse() -> bool:
    """It takes `pip install mfusepy`, `apt-get install fuse3 libfuse2`, and a kernel that has it."""
    return (
        importlib.util.find_spec("mfusepy") is not None
        and Path("/dev/fuse").exists()
        and ctypes.util.find_library("fuse") is not None
        and UNMOUNT is not None
    )


class Noting(PosixFileSystem):
    """Notes the store's own calls as the FUSE disk does the kernel's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes: list[Note] = []
        self._offsets: dict[int, int] = {}

    def _path(self, path: str) -> str:
        return "/" + str(Path(path).relative_to(self.root)).removeprefix(".")

    def create(self, path: str) -> int:
        fd = super().create(path)
        self.notes.append(("name", self._path(path), os.fstat(fd).st_ino))
        self._offsets[os.fstat(fd).st_ino] = 0
        return fd

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        n, inode = super().writev(fd, buffers), os.fstat(fd).st_ino
        data = b"".join(bytes(buffer) for buffer in buffers)[:n]
        self.notes.append(("write", inode, self._offsets[inode], data.hex()))
        self._offsets[inode] += n
        return n

    def fsync(self, fd: int) -> None:
        self.notes.append(("fsync", os.fstat(fd).st_ino))

    def fsync_directory(self, directory: str) -> None:
        self.notes.append(("fsyncdir", self._path(directory)))

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self.notes.append(("name", self._path(target), os.lstat(target).st_ino))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.notes.append(("unname", self._path(path)))

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.notes.append(("rename", self._path(source), self._path(target), os.lstat(target).st_ino))

    def make_directories(self, path: str) -> None:
        super().make_directories(path)
        self.notes.append(("mkdir", self._path(path)))

    def lstat(self, path: str) -> os.stat_result:
        told = Path(path).name
        if told.startswith("told-"):
            self.notes.append(("told", int(told.removeprefix("told-"))))
        return super().lstat(path)


def _noted_without_fuse(tmp_path: Path, version: int) -> list[Note]:
    fs = Noting(tmp_path / "disk")
    save_twice(fs.root, version, fs)
    return fs.notes


def _noted(tmp_path: Path, version: int) -> list[Note]:
    """All changes that two saves make, as a FUSE disk sees them."""
    mount, notes = tmp_path / "mount", tmp_path / "notes"
    mount.mkdir()
    disk = subprocess.Popen([sys.executable, str(DISK), str(mount), str(notes)])
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(mount):
            assert time.monotonic() < deadline
            assert disk.poll() is None
            time.sleep(0.02)
        subprocess.run(
            [sys.executable, str(WRITER), str(mount), str(version)],
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            timeout=60,
            check=True,
        )
    finally:
        subprocess.run([str(UNMOUNT), "-u", str(mount)], check=False, capture_output=True)
        disk.wait(20)
    found: list[Note] = json.loads(notes.read_text())
    return found


FOLDER = -1  # in place of an inode


class Cut:
    """A disk's state after the first calls, as far as a power cut leaves it."""

    def __init__(self, notes: Sequence[Note]) -> None:
        self.n_told = 0
        self._kept: dict[int, bytes] = {}
        self._writes: dict[int, list[tuple[int, bytes]]] = {}
        self._entries: dict[str, int] = {}
        self._pending: list[Note] = []
        for note in notes:
            self._follow(*note)

    def _follow(self, call: str, *what: Any) -> None:
        if call == "told":
            self.n_told = what[0]
        elif call == "mkdir":
            self._pending.append(("name", what[0], FOLDER, str(Path(what[0]).parent)))
        elif call == "write":
            self._writes.setdefault(what[0], []).append((what[1], bytes.fromhex(what[2])))
        elif call == "fsync":
            self._kept[what[0]] = self._content(what[0], lambda: True)
            self._writes.pop(what[0], None)
        elif call == "fsyncdir":
            inside = [note for note in self._pending if str(Path(note[-1])) == what[0]]
            for note in inside:
                _change(self._entries, note)
            self._pending = [note for note in self._pending if note not in inside]
        elif call == "rename":
            old, new, inode = what
            self._pending += [("unname", old, str(Path(old).parent)), ("name", new, inode, str(Path(new).parent))]
        else:
            self._pending.append((call, *what, str(Path(what[0]).parent)))

    def _content(self, inode: int, survives: Any) -> bytes:
        content = bytearray(self._kept.get(inode, b""))
        for offset, data in self._writes.get(inode, ()):
            if survives():
                content.extend(bytes(max(0, offset + len(data) - len(content))))
                content[offset : offset + len(data)] = data
        return bytes(content)

    def leave(self, root: Path, luck: random.Random) -> None:
        """Makes what the next start finds."""
        entries = dict(self._entries)
        for note in self._pending[: luck.randint(0, len(self._pending))]:
            _change(entries, note)
        root.mkdir()
        for folder in sorted(name for name, inode in entries.items() if inode == FOLDER):
            if (root / folder[1:]).parent.exists():  # else it went with the one that it was in
                (root / folder[1:]).mkdir()
        for name, inode in entries.items():
            if inode == FOLDER or not (root / name[1:]).parent.exists():
                continue
            data = self._content(inode, lambda: luck.random() < 0.5)
            (root / name[1:]).write_bytes(data)


def _change(entries: dict[str, int], note: Note) -> None:
    if note[0] == "name":
        entries[note[1]] = note[2]
    else:
        entries.pop(note[1], None)


def _n_good(root: Path, version: int) -> int:
    """How many rows a node gets after the start; all of them right."""
    store = SnapshotStore(root, "feed", GEOMETRY, 1024, 1 << 20, 10, "node-1", version=3 if version == 3 else 1)
    store.reap()
    store.refresh()
    assert not list(store.path.glob("*.tmp"))
    while (match := store.find(IDS)) is not None:
        rows = MemoryRows.empty(GEOMETRY, 80)
        try:
            n_good = store.restore_usable(match, match.n_common, rows)
        except StoreError:
            continue  # it is not offered again
        assert (rows.k[:, :n_good] == np.arange(n_good)[None, :, None]).all()
        assert (rows.v[:, :n_good] == -np.arange(n_good)[None, :, None]).all()
        return n_good
    return 0


@pytest.mark.parametrize("version", [1, 3])
def test_a_power_cut_after_each_call_loses_nothing_that_was_said_to_be_saved(tmp_path: Path, version: int) -> None:
    notes = _noted(tmp_path, version) if _has_fuse() else _noted_without_fuse(tmp_path, version)
    told: set[int] = set()
    n_cases = n_more = 0
    for n_calls in range(len(notes) + 1):
        cut = Cut(notes[:n_calls])
        told.add(cut.n_told)
        for seed in range(N_SEEDS):
            root = tmp_path / "left"
            cut.leave(root, random.Random(seed))
            n_good = _n_good(root, version)
            assert n_good >= cut.n_told, f"after {n_calls} calls ({notes[n_calls - 1][0]}), seed {seed}"
            n_more += n_good > cut.n_told
            n_cases += 1
            shutil.rmtree(root, ignore_errors=True)
    assert told == {0, 40, 80}
    assert n_more > 0  # some cuts come between the save and the word of it
    assert n_cases > 15 * N_SEEDS
