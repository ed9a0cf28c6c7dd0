"""Promise 2 on a real file system: a FUSE disk that forgets what was not synced, and a power cut after each call."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

pytestmark = pytest.mark.slow

DISK = Path(__file__).with_name("forgetful_disk.py")
WRITER = Path(__file__).with_name("save_twice.py")
SOURCES = Path(__file__).parents[2] / "src"
UNMOUNT = shutil.which("fusermount") or shutil.which("fusermount3")
GEOMETRY = KvGeometry(2, 2, 4)
IDS = np.arange(1, 81)


def _reason() -> str | None:
    if importlib.util.find_spec("mfusepy") is None:
        return "pip install mfusepy"
    if not Path("/dev/fuse").exists():
        return "this machine has no /dev/fuse"
    if ctypes.util.find_library("fuse") is None or UNMOUNT is None:
        return "libfuse and fusermount are needed: apt-get install fuse3 libfuse2"
    return None


def _rows() -> MemoryRows:
    rows = MemoryRows.empty(GEOMETRY, 80)
    rows.k[:] = np.arange(80)[None, :, None]
    rows.v[:] = -rows.k
    return rows


def _open(root: Path) -> SnapshotStore:
    return SnapshotStore(root, "feed", GEOMETRY, 1024, 1 << 20, 10, "node-1", version=3)


def _run(tmp_path: Path, cut_after: int) -> tuple[int, bool]:
    """Rows acknowledged before the cut, and whether the save ran to its end; asserts what is found after it."""
    mount, kept, acknowledged = (tmp_path / f"{name}{cut_after}" for name in ("mount", "kept", "acknowledged"))
    mount.mkdir()
    kept.mkdir()
    acknowledged.write_text("0")
    disk = subprocess.Popen([sys.executable, str(DISK), str(mount), str(kept), str(cut_after)])
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(mount):
            assert time.monotonic() < deadline
            assert disk.poll() is None
            time.sleep(0.02)
        command = [sys.executable, str(WRITER), str(mount), str(acknowledged)]
        environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
        writer = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
        finished = writer.returncode == 0
    finally:
        subprocess.run([UNMOUNT, "-u", str(mount)], check=False, capture_output=True)
        disk.wait(20)
    store = _open(kept)
    store.reap()
    store.refresh()
    n_saved = int(acknowledged.read_text())
    match = store.find(IDS)
    n_good = 0
    if match is not None:
        rows = MemoryRows.empty(GEOMETRY, 80)
        n_good = store.restore_usable(match, match.n_common, rows)
        assert np.array_equal(rows.k[:, :n_good], _rows().k[:, :n_good])
    assert n_good >= n_saved
    return n_saved, finished


def test_a_power_cut_after_each_call_of_a_real_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    reason = _reason()
    if reason is not None:
        pytest.skip(reason)
    outcomes = set()
    for cut_after in range(1, 120, 3):
        n_saved, finished = _run(tmp_path, cut_after)
        outcomes.add(n_saved)
        if finished:
            break
    assert finished
    assert outcomes == {0, 40, 80}
