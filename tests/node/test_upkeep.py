"""What a node does for its store while nothing waits to be saved."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.kv_cache import Planes
from kvferry.node import io_lane, io_threads
from kvferry.node.io_threads import IoThreads
from kvferry.node.messages import PublishDone, PublishRequest
from kvferry.store.directory import ReapReport
from kvferry.store.errors import StoreUnavailable
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.names import temp_name
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


class Ones:
    """Stands in for a sequence of the engine's cache."""

    n_rows = len(IDS)
    block_table = np.empty(0, np.int32)

    def reserve(self, n_rows: int) -> None:
        """They are there."""

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        del layer, start, stop
        for plane in planes:
            plane[:] = 1


def test_a_store_that_was_away_at_the_start_is_prepared_though_a_save_finds_it_back_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_lane, "PROBE_SECONDS", 0.3)
    store, answers = store_at(tmp_path, "node"), queue.Queue[PublishDone]()
    left = store_at(tmp_path, "node")
    left.reap()
    (left.path / temp_name("kv3_" + "0" * 32 + ".kv", "node", "1" * 32, 5)).touch()

    reap, is_there = store.reap, False

    def away_at_first() -> ReapReport:
        nonlocal is_there
        if is_there:
            return reap()
        is_there = True
        raise StoreUnavailable("it does not answer", op="reap", path=tmp_path)

    monkeypatch.setattr(store, "reap", away_at_first)
    io = IoThreads(
        open_store=lambda _: store,
        new_sequence=lambda: pytest.fail("nothing is restored"),
        deliver=answers.put,
        stall_seconds=5.0,
    )
    io.start()
    try:
        io.submit(PublishRequest(1, "session", IDS, Ones(), 0))
        assert answers.get(timeout=5).published is not None
        deadline = time.monotonic() + 10
        while not io.store_id:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        assert io.close(5.0)
    assert not list(store.path.glob("*.tmp"))
