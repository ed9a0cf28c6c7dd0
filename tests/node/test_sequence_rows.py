"""The engine's blocks are the format's tiles: what is written in place is read as rows, and the other way round."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.kernels import kv_copy, kv_read
from kvferry.engine.kernels.warm_up import compile_all
from kvferry.engine.kv_cache import KvGeometry, KvKind, KvPool, KvSequence
from kvferry.node.sequence_rows import SequenceRows
from kvferry.store import geometry, reader, vlkv
from kvferry.store.errors import SnapshotRejected
from kvferry.store.fs import PosixFileSystem
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.payload import Kind, MemoryPlanes
from kvferry.store.publish import create_temp, write_q8_snapshot
from kvferry.store.q8 import Q8Rows
from kvferry.store.seals import EncryptedSeal, KeyedSeal, Seal
from kvferry.store.segment_file import Terms, open_segment
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


@pytest.mark.parametrize(("version", "in_place"), [(1, True), (3, True), (3, False)])
def test_saving_and_restoring_take_the_same_few_mib_whatever_the_size(tmp_path, version, in_place):
    """64 MiB of rows, at most 16 MiB beside them: two threads with a few MiB each. Not of the rows' size."""
    cache_shape, n = KvGeometry(4, 8, 128), 2048
    pool = KvPool(cache_shape, 2 * n // 32 * cache_shape.block_bytes)
    pool.tiles[:] = 1
    source, ids = KvSequence(pool), np.arange(1, n + 1, dtype=np.int32)
    source.reserve(n)
    source.commit(n)
    store = SnapshotStore(
        tmp_path, "feed", geometry.KvGeometry(4, 8, 128), 1 << 20, 1 << 30, 100, "node-1", version=version
    )
    used = pool if in_place else None
    tracemalloc.start()
    try:
        store.publish(ids, SequenceRows(used, source))
        _, saving = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        store.restore(store.find(ids), n, SequenceRows(used, KvSequence(pool), n))
        _, restoring = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(saving, restoring) < 16 << 20


KINDS = [(KvKind.F32, Kind.F32), (KvKind.F16, Kind.F16), (KvKind.Q8, Kind.Q8)]
N = 150


class OneCallerSystem(PosixFileSystem):
    """Tells what Python itself read."""

    def __init__(self) -> None:
        self.n_read = 0

    def preadv(self, fd, buffers, offset):
        self.n_read += sum(map(len, buffers))
        return super().preadv(fd, buffers, offset)


class Cache:
    """A cache of a kind with one filled sequence, and a store for it."""

    def __init__(self, root: Path, cache_kind: KvKind, kind: Kind, version: int = 3, seal: Seal | None = None) -> None:
        self.shape = KvGeometry(3, 2, 32, kind=cache_kind)
        self.geometry = geometry.KvGeometry(3, 2, 32)
        self.pool = KvPool(self.shape, 16 * self.shape.block_bytes)
        self.fs = OneCallerSystem()
        self.kind = kind
        self.store = SnapshotStore(
            root,
            "feed",
            self.geometry,
            1024,
            1 << 30,
            100,
            "node-1",
            version=version,
            kind=kind,
            fs=self.fs,
            seal=seal,
        )
        self.source = KvSequence(self.pool)
        random = np.random.default_rng(5)
        for layer in range(3):
            planes = self.shape.empty_planes(N)
            for plane in planes:
                plane[:] = random.integers(1, 100, plane.shape)
            self.source.write_planes(layer, 0, planes)
        self.source.commit(N)

    def planes(self, sequence: KvSequence, n: int) -> list[bytes]:
        found = []
        for layer in range(3):
            planes = self.shape.empty_planes(n)
            sequence.read_planes(layer, 0, n, planes)
            found += [plane.tobytes() for plane in planes]
        return found

    def restore(self, n: int) -> KvSequence:
        sequence = KvSequence(self.pool)
        match = self.store.find(IDS[:n])
        assert self.store.restore_usable(match, n, SequenceRows(self.pool, sequence, n)) == n
        sequence.commit(n)
        return sequence


@pytest.mark.parametrize(("version", "cache_kind", "kind"), [(1, KvKind.F32, Kind.F32), *((3, *k) for k in KINDS)])
def test_a_nodes_first_save_and_restore_wait_for_no_compiler(tmp_path, version, cache_kind, kind):
    """A kernel called otherwise than it was compiled is compiled again: the store seems to hang for those seconds."""
    compile_all()
    kernels = (kv_copy.rows_to_tiles, kv_copy.tiles_to_rows, kv_read.read_tiles, kv_read.read_rows)
    compiled = [set(kernel.signatures) for kernel in kernels]
    cache = Cache(tmp_path, cache_kind, kind, version)
    cache.store.publish(IDS, SequenceRows(cache.pool, cache.source))
    cache.restore(N - 1)
    assert [set(kernel.signatures) for kernel in kernels] == compiled


@pytest.mark.parametrize(("cache_kind", "kind"), KINDS)
def test_every_kind_is_read_in_place_and_copied_rows_are_the_same(tmp_path, cache_kind, kind):
    cache = Cache(tmp_path, cache_kind, kind)
    info = cache.store.publish(IDS, SequenceRows(cache.pool, cache.source))
    cache.fs.n_read = 0
    assert cache.planes(cache.restore(N), N) == cache.planes(cache.source, N)
    assert cache.fs.n_read < info.n_bytes / 3  # the head, the digests, the block in part: the rest went straight in
    copied = MemoryPlanes.empty(kind, cache.geometry, N)
    cache.store.restore(cache.store.find(IDS), N, copied)
    assert [plane[layer].tobytes() for layer in range(3) for plane in copied.arrays] == cache.planes(cache.source, N)


@pytest.mark.parametrize(("cache_kind", "kind"), KINDS)
def test_damage_is_noticed_in_place(tmp_path, cache_kind, kind):
    cache = Cache(tmp_path, cache_kind, kind)
    info = cache.store.publish(IDS, SequenceRows(cache.pool, cache.source))
    path = cache.store.path / info.name
    with open_segment(cache.fs, path, Terms(kind=kind)) as file:
        at = file.extent.block_offset(1, 2) + 100
    with path.open("r+b") as damaged:
        damaged.seek(at)
        byte = damaged.read(1)[0]
        damaged.seek(at)
        damaged.write(bytes([byte ^ 1]))
    sequence = KvSequence(cache.pool)
    assert cache.store.restore_usable(cache.store.find(IDS), N, SequenceRows(cache.pool, sequence, N)) == 64
    sequence.commit(64)
    assert cache.planes(sequence, 64) == cache.planes(cache.source, 64)


@pytest.mark.parametrize("seal", [KeyedSeal, EncryptedSeal])
@pytest.mark.parametrize(("cache_kind", "kind"), KINDS)
def test_blocks_sealed_with_a_key_come_back_as_they_were_up_to_a_damaged_one(tmp_path, cache_kind, kind, seal):
    cache = Cache(tmp_path, cache_kind, kind, seal=seal(b"k" * 32))
    info = cache.store.publish(IDS, SequenceRows(cache.pool, cache.source))
    restored = cache.restore(N)
    assert cache.planes(restored, N) == cache.planes(cache.source, N)
    restored.release()
    path = cache.store.path / info.name
    with open_segment(cache.fs, path, Terms(kind=kind, seal=seal(b"k" * 32))) as file:
        at = file.extent.block_offset(2, 1) + 5
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    sequence = KvSequence(cache.pool)
    assert cache.store.restore_usable(cache.store.find(IDS), N, SequenceRows(cache.pool, sequence, N)) == 32
    sequence.commit(32)
    assert cache.planes(sequence, 32) == cache.planes(cache.source, 32)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_scale_that_cannot_be_one_is_refused_in_place(tmp_path, scale):
    cache = Cache(tmp_path, KvKind.Q8, Kind.Q8)
    tiles = cache.pool.tiles[cache.source.block_table[1], 2, 1, 1]
    tiles[32 * 32 :].view(np.float32)[7] = scale
    cache.store.publish(IDS, SequenceRows(cache.pool, cache.source))
    with pytest.raises(SnapshotRejected, match="scale") as refused:
        cache.restore(N)
    assert refused.value.reason == "bad_scale"


def test_version_1_is_read_in_place(tmp_path):
    cache = Cache(tmp_path, KvKind.F32, Kind.F32, version=1)
    info = cache.store.publish(IDS, SequenceRows(cache.pool, cache.source))
    cache.fs.n_read = 0
    assert cache.planes(cache.restore(N), N) == cache.planes(cache.source, N)
    assert cache.fs.n_read < info.n_bytes / 3
    assert cache.planes(cache.restore(77), 77) == cache.planes(cache.source, 77)


def test_a_file_that_ends_too_early_is_refused_in_place(tmp_path, monkeypatch):
    cache = Cache(tmp_path, KvKind.F32, Kind.F32, version=1)
    info = cache.store.publish(IDS, SequenceRows(cache.pool, cache.source))
    path, was = cache.store.path / info.name, reader.SnapshotFile.check_prefix

    def cut(snapshot, wanted):
        was(snapshot, wanted)
        with path.open("r+b") as file:
            file.truncate(info.n_bytes // 2)

    monkeypatch.setattr(reader.SnapshotFile, "check_prefix", cut)
    with pytest.raises(SnapshotRejected) as refused:
        cache.restore(N)
    assert refused.value.reason == "size_mismatch"


def test_a_q8_cache_takes_version_2_files(tmp_path):
    cache = Cache(tmp_path, KvKind.Q8, Kind.Q8)
    planes = [cache.shape.empty_planes(N) for _ in range(3)]
    for layer in range(3):
        cache.source.read_planes(layer, 0, N, planes[layer])
    rows = Q8Rows(*(np.stack(arrays) for arrays in zip(*planes, strict=True)))
    token_hash = vlkv.fnv1a(IDS)
    cache.store.reap()
    final = cache.store.path / vlkv.file_name(token_hash)
    with create_temp(cache.fs, final.with_suffix(".tmp")) as temp:
        write_q8_snapshot(temp, cache.geometry, IDS, token_hash, rows)
        temp.path.rename(final)
    cache.store.refresh()
    assert cache.planes(cache.restore(N), N) == cache.planes(cache.source, N)


@pytest.mark.parametrize(("first_block", "n_blocks"), [(0, 3), (1, 2), (2, 1), (9, 1)])
def test_nothing_is_read_to_where_no_block_is_held(tmp_path, first_block, n_blocks):
    cache = Cache(tmp_path, KvKind.F32, Kind.F32)
    other, sequence = KvSequence(cache.pool), KvSequence(cache.pool)
    other.reserve(64)
    before = cache.pool.tiles.tobytes()
    sink = SequenceRows(cache.pool, sequence, 64)  # two blocks
    path = tmp_path / "rows"
    path.write_bytes(b"\x01" * 8 * cache.shape.block_bytes)
    with path.open("rb") as file:
        nothing = memoryview(b"")
        assert sink.tile_buffers(0, first_block, n_blocks) is None
        assert not sink.read_tiles_in_place(file.fileno(), 0, 0, first_block, n_blocks, nothing)
        assert not sink.read_rows_in_place(file.fileno(), 0, 0, first_block * 32, n_blocks * 32, 32)
        assert cache.pool.tiles.tobytes() == before
        sequence.commit(64)
        for first in (0, 1):  # these hold rows that count
            assert sink.tile_buffers(0, first, 1) is None
            assert not sink.read_tiles_in_place(file.fileno(), 0, 0, first, 1, nothing)
            assert not sink.read_rows_in_place(file.fileno(), 0, 0, first * 32, 32, 32)
    assert cache.pool.tiles.tobytes() == before
