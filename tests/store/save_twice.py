"""Saves 40, then 80 tokens of one sequence: `save_twice.py ROOT VERSION`. After each it looks for ROOT/told-N."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np

from kvferry.store.fs import FileSystem, PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore


def save_twice(root: Path, version: int, fs: FileSystem) -> None:
    geometry = KvGeometry(2, 2, 4)
    rows = MemoryRows.empty(geometry, 80)
    rows.k[:] = np.arange(80)[None, :, None]
    rows.v[:] = -rows.k
    store = SnapshotStore(root, "feed", geometry, 1024, 1 << 20, 10, "node-1", version=3 if version == 3 else 1, fs=fs)
    store.reap()
    for n in (40, 80):
        store.publish(np.arange(1, 81)[:n], rows)
        with contextlib.suppress(FileNotFoundError):
            fs.lstat(str(root / f"told-{n}"))


if __name__ == "__main__":
    save_twice(Path(sys.argv[1]), int(sys.argv[2]), PosixFileSystem())
