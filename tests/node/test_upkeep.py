"""What a node does for its store while nothing waits to be saved."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.node import io_lane, io_threads
from kvferry.node.io_threads import IoThreads
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(1, 1, 4)
IDS = np.arange(1, 301, dtype=np.int32)
ROWS = MemoryRows(np.ones((1, 300, 4), np.float32), np.ones((1, 300, 4), np.float32))


def store_at(root: Path, node_id: str) -> SnapshotStore:
    return SnapshotStore(root, "feed", GEOMETRY, 1024, 1 << 30, 1000, node_id, version=3)


def test_long_chains_become_short_ones_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_lane, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(io_threads, "UPKEEP_SECONDS", 0.05)
    writer = store_at(tmp_path, "writer")
    writer.reap()
    for n in range(3, 301, 3):
        writer.publish(IDS[:n], ROWS)
    assert len(list(writer.path.glob("*.kv"))) == 100
    io = IoThreads(
        open_store=lambda _: store_at(tmp_path, "node"),
        new_sequence=lambda: pytest.fail("nothing is restored"),
        deliver=queue.Queue().put,
        stall_seconds=5.0,
    )
    io.start()
    try:
        deadline = time.monotonic() + 20
        while len(list(writer.path.glob("*.kv"))) > 10:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        assert io.close(5.0)
    writer.refresh()
    assert writer.find(IDS).n_common == 300
