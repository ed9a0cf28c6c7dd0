"""What a restore shows of itself while it reads straight into the cache, and what stops it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.kv_cache import KvGeometry, KvPool, KvSequence
from kvferry.node.io_lane import IoLane
from kvferry.node.io_threads import IoThreads
from kvferry.node.messages import PublishRequest, RestoreDone, RestoreRequest
from kvferry.node.sequence_rows import SequenceRows
from kvferry.node.staged_rows import StagedRows
from kvferry.store import geometry
from kvferry.store.snapshot_store import SnapshotStore

N_LAYERS = 3
SHAPE = KvGeometry(N_LAYERS, 1, 8)
IDS = np.arange(1, 129, dtype=np.int32)
IN_PLACE = {1: "read_rows_in_place", 3: "read_tiles_in_place"}


class Kit:
    """A node's I/O threads, and one session of whole blocks in their store."""

    def __init__(self, root: Path, version: int) -> None:
        self.pool = KvPool(SHAPE, 16 * SHAPE.block_bytes)
        self.answers: queue.Queue[RestoreDone] = queue.Queue()
        self.io = IoThreads(
            open_store=lambda _: SnapshotStore(
                root, "feed", geometry.KvGeometry(N_LAYERS, 1, 8), 1000, 1 << 30, 1000, "n", version=version
            ),
            new_sequence=lambda: KvSequence(self.pool),
            deliver=self.answers.put,
            stall_seconds=5.0,
            pool=self.pool,
        )
        self.io.start()
        rows, sequence = np.ones((len(IDS), 8), np.float32), KvSequence(self.pool)
        for layer in range(N_LAYERS):
            sequence.write_rows(layer, 0, rows, rows)
        sequence.commit(len(IDS))
        self.io.submit(PublishRequest(1, "s", IDS, sequence, 0))
        assert self.answers.get(timeout=10).published
        sequence.release()

    def restore(self) -> tuple[RestoreRequest, RestoreDone]:
        request = RestoreRequest(2, "s", np.append(IDS, 7).astype(np.int32), 16, len(IDS))
        self.io.submit(request)
        return request, self.answers.get(timeout=10)


@pytest.fixture(params=[1, 3])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def kit(tmp_path: Path, version: int) -> Iterator[Kit]:
    kit = Kit(tmp_path, version)
    yield kit
    assert kit.io.close(5.0)


def test_every_run_that_is_read_in_place_shows_that_the_restore_gets_on(
    kit: Kit, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    tell, read = IoLane.tell, getattr(SequenceRows, IN_PLACE[version])
    monkeypatch.setattr(IoLane, "tell", lambda lane: (told.append("told"), tell(lane))[1])
    monkeypatch.setattr(
        SequenceRows, IN_PLACE[version], lambda rows, *arguments: (told.append("read"), read(rows, *arguments))[1]
    )
    _, done = kit.restore()
    assert done.sequence is not None
    reads = [index for index, what in enumerate(told) if what == "read"]
    assert len(reads) == N_LAYERS
    assert all(told[index - 1] == "told" for index in reads)


def test_a_restore_that_nobody_waits_for_stops_and_gives_its_memory_back(
    kit: Kit, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_read = 0
    read, waiting = getattr(SequenceRows, IN_PLACE[version]), StagedRows

    def abandoned_meanwhile(rows, *arguments):
        nonlocal n_read
        n_read += 1
        assert isinstance(rows, waiting)
        rows._request.abandoned = True
        return read(rows, *arguments)

    monkeypatch.setattr(SequenceRows, IN_PLACE[version], abandoned_meanwhile)
    _, done = kit.restore()
    assert done.sequence is None
    assert n_read == 1
    assert kit.pool.n_free_blocks == kit.pool.n_blocks
