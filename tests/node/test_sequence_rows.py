"""Rows of every kind go to the store and come back as they were, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.engine.kv_cache import KvGeometry, KvKind, KvPool, KvSequence
from kvferry.node.config import load_config
from kvferry.node.errors import ConfigInvalid
from kvferry.node.sequence_rows import SequenceRows
from kvferry.store import geometry
from kvferry.store.payload import Kind
from kvferry.store.snapshot_store import SnapshotStore

N_ROWS = 75


def planes_of(shape: KvGeometry, seed: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    planes = shape.empty_planes(N_ROWS)
    for plane in planes:
        plane[:] = random.integers(-127, 128, plane.shape) if plane.dtype == np.int8 else random.random(plane.shape)
    return planes


@pytest.mark.parametrize("kind", list(KvKind))
@pytest.mark.parametrize("in_place", [True, False])
def test_saved_rows_come_back_as_they_were(tmp_path, kind, in_place):
    shape = KvGeometry(n_layers=2, n_kv_heads=3, head_dim=32, kind=kind)
    pool = KvPool(shape, 6 * shape.block_bytes)
    tokens = np.arange(N_ROWS, dtype=np.int32)
    sequence = KvSequence(pool)
    written = [planes_of(shape, layer) for layer in range(2)]
    for layer, planes in enumerate(written):
        sequence.write_planes(layer, 0, planes)
    sequence.commit(N_ROWS)
    store = SnapshotStore(
        tmp_path, "f" * 32, geometry.KvGeometry(2, 3, 32), 1000, 1 << 30, 100, "n", version=3, kind=Kind[kind.name]
    )
    store.publish(tokens, SequenceRows(pool if in_place else None, sequence))
    sequence.release()
    match = store.find(tokens)
    assert match is not None
    restored = KvSequence(pool)
    store.restore(match, 70, SequenceRows(pool if in_place else None, restored, 70))
    restored.commit(70)
    for layer, planes in enumerate(written):
        read = shape.empty_planes(70)
        restored.read_planes(layer, 0, 70, read)
        assert [a.tobytes() for a in read] == [np.ascontiguousarray(b[:70]).tobytes() for b in planes]


def test_a_store_that_cannot_hold_the_rows_is_refused_at_start(tmp_path):
    flags = {"model": "m", "store": tmp_path, "store_version": 1}
    assert load_config({**flags, "kv": "f32"}).kv == "f32"
    with pytest.raises(ConfigInvalid, match="version 1 snapshots hold f32 rows only, not q8: set store-version to 3"):
        load_config({**flags, "kv": "q8"})
