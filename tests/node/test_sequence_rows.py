"""The engine's blocks are the format's tiles: what is written in place is read as rows, and the other way round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.kv_cache import KvGeometry, KvPool, KvSequence
from kvferry.node.sequence_rows import SequenceRows
from kvferry.store import geometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

SHAPE = (3, 2, 8)
IDS = np.arange(1, 151, dtype=np.int32)
K = np.random.default_rng(4).standard_normal((3, 150, 16), np.float32)


@pytest.fixture
def pool() -> KvPool:
    return KvPool(KvGeometry(*SHAPE), 1 << 20)


def _store(root: Path) -> SnapshotStore:
    return SnapshotStore(root, "feed", geometry.KvGeometry(*SHAPE), 1024, 1 << 30, 100, "node-1", version=3)


def _filled(pool: KvPool) -> KvSequence:
    sequence = KvSequence(pool)
    for layer in range(3):
        sequence.write_rows(layer, 0, K[layer], -K[layer])
    sequence.commit(150)
    return sequence


def _rows(sequence: KvSequence, n: int) -> MemoryRows:
    rows = MemoryRows.empty(geometry.KvGeometry(*SHAPE), n)
    for layer in range(3):
        sequence.read_rows(layer, 0, n, rows.k[layer], rows.v[layer])
    return rows


@pytest.mark.parametrize("n_published", [(150,), (40, 100, 150)])
@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_written_in_place_are_the_rows(
    pool: KvPool, tmp_path: Path, n_published: tuple[int, ...], in_place: bool
) -> None:
    store, source = _store(tmp_path), SequenceRows(pool if in_place else None, _filled(pool))
    for n in n_published:
        store.publish(IDS[:n], source)
    for n in (1, 33, 64, 149, 150):
        match = store.find(IDS[:n], min_tokens=1)
        plain = MemoryRows.empty(geometry.KvGeometry(*SHAPE), n)
        store.restore(match, n, plain)
        sequence = KvSequence(pool)
        store.restore(match, n, SequenceRows(pool, sequence, n))
        sequence.commit(n)
        for rows in (plain, _rows(sequence, n)):
            assert rows.k.tobytes() == K[:, :n].tobytes()
            assert rows.v.tobytes() == (-K[:, :n]).tobytes()
        sequence.release()
