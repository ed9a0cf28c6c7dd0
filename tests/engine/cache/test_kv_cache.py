"""Blocks are counted, prefixes shared, and rows come back as they were written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.errors import OutOfKvMemory
from kvferry.engine.kv_cache import KvGeometry, KvPool, KvSequence

GEOMETRY = KvGeometry(n_layers=2, n_kv_heads=3, head_dim=32)


@pytest.fixture
def pool() -> KvPool:
    return KvPool(GEOMETRY, 6 * GEOMETRY.block_bytes)


def rows(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, GEOMETRY.kv_dim)).astype(np.float32)


def fill(sequence: KvSequence, start: int, n: int, seed: int) -> None:
    for layer in range(GEOMETRY.n_layers):
        sequence.write_rows(layer, start, rows(n, seed + layer), rows(n, seed + 100 + layer))
    sequence.commit(start + n)


def read(sequence: KvSequence, layer: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    k = np.empty((stop - start, GEOMETRY.kv_dim), np.float32)
    v = np.empty_like(k)
    sequence.read_rows(layer, start, stop, k, v)
    return k, v


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 150), data=st.data())
def test_any_range_of_rows_comes_back_as_written(n, data):
    pool = KvPool(GEOMETRY, 6 * GEOMETRY.block_bytes)
    sequence = KvSequence(pool)
    start = 0
    while start < n:
        count = data.draw(st.integers(1, n - start))
        for layer in range(GEOMETRY.n_layers):
            part = slice(start, start + count)
            sequence.write_rows(layer, start, rows(n, layer)[part].copy(), rows(n, 9 + layer)[part].copy())
        sequence.commit(start + count)
        start += count
    a = data.draw(st.integers(0, n))
    b = data.draw(st.integers(a, n))
    for layer in range(GEOMETRY.n_layers):
        k, v = read(sequence, layer, a, b)
        assert np.array_equal(k, rows(n, layer)[a:b])
        assert np.array_equal(v, rows(n, 9 + layer)[a:b])


def test_staged_rows_do_not_count_until_committed(pool):
    sequence = KvSequence(pool)
    sequence.write_rows(0, 0, rows(5, 1), rows(5, 2))
    assert sequence.n_rows == 0
    with pytest.raises(ValueError, match="rows 0 to 5"):
        read(sequence, 0, 0, 5)
    sequence.commit(5)
    assert sequence.n_rows == 5


def test_rows_that_count_never_change(pool):
    sequence = KvSequence(pool)
    fill(sequence, 0, 5, 1)
    with pytest.raises(ValueError, match="never change"):
        sequence.write_rows(0, 4, rows(1, 1), rows(1, 1))


def test_a_fork_shares_full_blocks_and_both_grow(pool):
    sequence = KvSequence(pool)
    fill(sequence, 0, 70, 1)
    fork = sequence.fork(40)
    assert pool.n_free_blocks == 6 - 3 - 1  # three of the original, one copy of the partial block
    fill(fork, 40, 10, 50)
    fill(sequence, 70, 3, 60)
    assert np.array_equal(read(sequence, 1, 0, 70)[0], rows(70, 2))
    assert np.array_equal(read(fork, 1, 0, 40)[0], rows(70, 2)[:40])
    assert np.array_equal(read(fork, 1, 40, 50)[0], rows(10, 51))
    sequence.release()
    assert np.array_equal(read(fork, 0, 0, 40)[1], rows(70, 101)[:40])
    fork.release()
    assert pool.n_free_blocks == pool.n_blocks


def test_adopted_rows_are_shared_and_reserved_blocks_stay(pool):
    source, other = KvSequence(pool), KvSequence(pool)
    fill(source, 0, 70, 1)
    fill(other, 0, 10, 1)
    other.reserve(90)
    assert pool.n_free_blocks == 0
    other.adopt(source, 32)
    other.adopt(source, 64)
    assert pool.n_free_blocks == 2  # of the three blocks held, two are the source's now
    assert (other.n_rows, other.n_blocks) == (64, 3)
    fill(other, 64, 20, 50)
    assert np.array_equal(read(other, 1, 0, 64)[0], rows(70, 2)[:64])
    assert np.array_equal(read(source, 1, 64, 70)[0], rows(70, 2)[64:])
    source.release()
    assert np.array_equal(read(other, 0, 0, 64)[1], rows(70, 101)[:64])
    other.release()
    assert pool.n_free_blocks == pool.n_blocks


@pytest.mark.parametrize("n_rows", [31, 96, 0])
def test_only_whole_blocks_that_are_there_can_be_adopted(pool, n_rows):
    source, other = KvSequence(pool), KvSequence(pool)
    fill(source, 0, 70, 1)
    fill(other, 0, 10, 1)
    with pytest.raises(ValueError, match="cannot adopt"):
        other.adopt(source, n_rows)


def test_an_empty_pool_says_so_and_changes_nothing(pool):
    sequence, other = KvSequence(pool), KvSequence(pool)
    sequence.reserve(5 * 32)
    with pytest.raises(OutOfKvMemory, match="2 KV blocks are needed and 1 of 6 are free"):
        other.reserve(33)
    assert (other.n_blocks, pool.n_free_blocks) == (0, 1)
    sequence.release()
    sequence.release()
    assert pool.n_free_blocks == 6
    with pytest.raises(OutOfKvMemory):
        KvPool(GEOMETRY, GEOMETRY.block_bytes - 1)


def test_rows_behind_a_cut_are_gone_and_their_blocks_free(pool):
    sequence = KvSequence(pool)
    fill(sequence, 0, 100, seed=1)
    sequence.truncate(40)
    assert (sequence.n_rows, sequence.n_blocks, pool.n_free_blocks) == (40, 2, 4)
    fill(sequence, 40, 10, seed=2)
    assert np.array_equal(read(sequence, 0, 0, 40)[0], rows(100, 1)[:40])
    assert np.array_equal(read(sequence, 0, 40, 50)[0], rows(10, 2))
    sequence.truncate(0)
    assert (sequence.n_rows, pool.n_free_blocks) == (0, 6)
    with pytest.raises(ValueError, match="truncate"):
        sequence.truncate(1)


def test_a_cut_leaves_the_blocks_of_others_as_they_are(pool):
    sequence = KvSequence(pool)
    fill(sequence, 0, 70, seed=1)
    fork = sequence.fork(64)
    fork.truncate(40)
    fill(fork, 40, 24, seed=2)
    assert np.array_equal(read(sequence, 1, 0, 70)[1], rows(70, 102))
    assert np.array_equal(read(fork, 1, 0, 40)[1], rows(70, 102)[:40])
    fork.truncate(32)  # at a block's edge: nothing has to be copied
    assert pool.n_free_blocks == 3
    fork.release()
    sequence.release()
    assert pool.n_free_blocks == 6


def test_a_cut_into_a_shared_block_without_a_free_one_changes_nothing(pool):
    sequence = KvSequence(pool)
    fill(sequence, 0, 64, seed=1)
    fork = sequence.fork(64)
    KvSequence(pool).reserve(4 * 32)
    with pytest.raises(OutOfKvMemory):
        fork.truncate(40)
    assert (fork.n_rows, fork.n_blocks) == (64, 2)


def test_a_released_sequence_is_of_no_use(pool):
    sequence = KvSequence(pool)
    sequence.release()
    with pytest.raises(ValueError, match="released"):
        sequence.reserve(1)


def test_rows_of_a_wrong_shape_are_refused(pool):
    with pytest.raises(ValueError, match="contiguous float32"):
        KvSequence(pool).write_rows(0, 0, np.zeros((2, 5), np.float32), np.zeros((2, 5), np.float32))
