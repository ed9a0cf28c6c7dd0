"""Narrow caches: rows come back as they were stored, floats are what attention reads, and memory is counted exactly."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.engine.kernels import definition
from kvferry.engine.kv_cache import KvGeometry, KvKind, KvPool, KvSequence

KINDS = list(KvKind)


def geometry(kind: KvKind) -> KvGeometry:
    return KvGeometry(n_layers=2, n_kv_heads=3, head_dim=32, kind=kind)


def random_planes(shape: KvGeometry, n_rows: int, seed: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    planes = shape.empty_planes(n_rows)
    for plane in planes:
        if plane.dtype == np.int8:
            plane[:] = random.integers(-127, 128, plane.shape)
        else:
            plane[:] = random.standard_normal(plane.shape)
    return planes


@pytest.mark.parametrize(
    ("kind", "block_bytes"),
    [("f32", 2 * 2 * 96 * 32 * 4), ("f16", 2 * 2 * 96 * 32 * 2), ("q8", 2 * 2 * (96 + 12) * 32)],
)
def test_a_block_is_as_large_as_its_rows(kind, block_bytes):
    assert geometry(KvKind(kind)).block_bytes == block_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_as_they_were_stored(kind):
    shape = geometry(kind)
    sequence = KvSequence(KvPool(shape, 4 * shape.block_bytes))
    written = [random_planes(shape, 75, layer) for layer in range(2)]
    for start, stop in ((0, 20), (20, 75)):
        for layer, planes in enumerate(written):
            sequence.write_planes(layer, start, tuple(plane[start:stop].copy() for plane in planes))
        sequence.commit(stop)
    fork = sequence.fork(45)
    sequence.release()
    for layer, planes in enumerate(written):
        read = shape.empty_planes(35)
        fork.read_planes(layer, 10, 45, read)
        assert [a.tobytes() for a in read] == [np.ascontiguousarray(b[10:45]).tobytes() for b in planes]


@pytest.mark.parametrize("kind", KINDS)
def test_floats_are_what_attention_reads(kind):
    shape = geometry(kind)
    sequence = KvSequence(KvPool(shape, 2 * shape.block_bytes))
    rows = np.random.default_rng(1).standard_normal((2, 40, 96)).astype(np.float32)
    if kind is KvKind.Q8:
        values, scales = definition.kept_q8(rows.reshape(2, 40, 3, 32))
        planes = (*values.reshape(2, 40, 96), *scales)
    else:
        planes = tuple(rows.astype(kind.dtype))
    sequence.write_planes(0, 0, planes)
    sequence.commit(40)
    k, v = np.empty((40, 96), np.float32), np.empty((40, 96), np.float32)
    sequence.read_rows(0, 0, 40, k, v)
    expected = definition.kept(rows.reshape(2, 40, 3, 32), kind.value).reshape(2, 40, 96)
    assert (k.tobytes(), v.tobytes()) == (expected[0].tobytes(), expected[1].tobytes())


@pytest.mark.parametrize("kind", [KvKind.F16, KvKind.Q8])
def test_floats_are_not_narrowed_on_the_way_in(kind):
    """Narrowing a widened row again may change it: only stored rows may be written."""
    shape = geometry(kind)
    sequence = KvSequence(KvPool(shape, shape.block_bytes))
    rows = np.zeros((1, 96), np.float32)
    with pytest.raises(ValueError, match="as planes"):
        sequence.write_rows(0, 0, rows, rows)
    with pytest.raises(ValueError, match=r"contiguous|arrays"):
        sequence.write_planes(0, 0, (rows, rows))
