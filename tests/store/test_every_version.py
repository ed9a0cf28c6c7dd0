"""Promises 4 and 5 for versions 1, 2 and 3: whatever happened to a file's bytes, it is refused with a declared reason,
and nothing big is allocated for what it claims.

The rows of versions 1 and 2 have no digests (the formats are the seed's): damage there is out of a reader's sight, but
for the size and the scales. Nodes write version 3.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvferry.store import vlkv, vlkv3
from kvferry.store.errors import EXIT_CODES, SnapshotRejected
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.inspection import WHOLE_FILES, judge
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.payload import Kind
from kvferry.store.publish import create_temp, write_q8_snapshot
from kvferry.store.q8 import Q8Rows
from kvferry.store.seals import ENTRY_BYTES, ROOT_BYTES, PlainSeal
from kvferry.store.segment_file import Terms, open_segment
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(3, 2, 4)
N_TOKENS = 110
IDS = np.arange(1, N_TOKENS + 1, dtype=np.int32)
VOCAB = 1024


class OneFile(PosixFileSystem):
    """A file system with one file in memory, so that a hundred thousand damaged versions of it cost no disk."""

    def __init__(self, path: Path) -> None:
        self.fd = os.memfd_create("snapshot")
        self.path = path

    def holds(self, data: bytes | bytearray | memoryview) -> None:
        os.ftruncate(self.fd, len(data))
        os.pwrite(self.fd, data, 0)

    def open_read(self, path: str) -> int:
        assert path == str(self.path)
        return os.dup(self.fd)


@dataclass
class Sample:
    """A good file, and how many of its first bytes are protected."""

    version: int
    good: bytes
    n_protected: int
    fs: OneFile

    def verdict(self, data: bytes | bytearray, geometry: KvGeometry | None = GEOMETRY) -> str | None:
        """What a reader says that reads to the end: a reason, None when it takes the file."""
        self.fs.holds(data)
        if self.version != 3:
            refusal = judge(self.fs, self.fs.path, geometry, VOCAB)
            return None if refusal is None else refusal.reason
        try:
            with open_segment(self.fs, self.fs.path, Terms(geometry, vocab_size=VOCAB)) as file:
                return "block_digest_mismatch" if file.damaged_blocks() else None
        except SnapshotRejected as error:
            return error.reason


def _write(root: Path, version: int) -> Path:
    k = np.random.default_rng(1).standard_normal((3, N_TOKENS, 8), np.float32)
    if version == 2:
        rows = Q8Rows.empty(GEOMETRY, N_TOKENS)
        rows.k_scale[:] = rows.v_scale[:] = 0.5
        path = root / vlkv.file_name(vlkv.fnv1a(IDS))
        with create_temp(PosixFileSystem(), root / "temp") as temp:
            write_q8_snapshot(temp, GEOMETRY, IDS, vlkv.fnv1a(IDS), rows)
            os.link(temp.path, path)
        return path
    store = SnapshotStore(
        root, "feed", GEOMETRY, VOCAB, 1 << 30, 10, "node-1", version=3 if version == 3 else 1, kind=Kind.F32
    )
    return store.path / store.publish(IDS, MemoryRows(k, -k)).name


@pytest.fixture(params=[1, 2, 3], ids=lambda version: f"v{version}")
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sample]:
    path = _write(tmp_path, request.param)
    good, fs = path.read_bytes(), OneFile(path)
    yield Sample(request.param, good, len(good) if request.param == 3 else 64 + 4 * N_TOKENS, fs)
    os.close(fs.fd)


def test_the_undamaged_file_is_taken(sample: Sample) -> None:
    assert len(sample.good) > 10_000
    assert sample.verdict(sample.good) is None


def test_every_flipped_bit_of_the_header_is_refused(sample: Sample) -> None:
    for bit in range(64 * 8):
        damaged = bytearray(sample.good)
        damaged[bit // 8] ^= 1 << bit % 8
        assert sample.verdict(damaged) in EXIT_CODES, f"bit {bit}"


def test_10000_truncations_are_refused(sample: Sample) -> None:
    lengths = [*range(500), *random.Random(4).sample(range(500, len(sample.good)), 9_500)]
    assert len(lengths) == 10_000
    for n_bytes in lengths:
        reason = sample.verdict(sample.good[:n_bytes])
        assert reason in {"truncated_header", "size_mismatch"}, n_bytes


@pytest.mark.parametrize("n_flips", [1, 3])
def test_10000_random_bit_flips_are_refused(sample: Sample, n_flips: int) -> None:
    """5,000 of single bits and 5,000 of three, in all that the version protects."""
    choices = random.Random(n_flips)
    for _ in range(5_000):
        damaged = bytearray(sample.good)
        for bit in choices.sample(range(8 * sample.n_protected), n_flips):
            damaged[bit // 8] ^= 1 << bit % 8
        assert sample.verdict(damaged) in EXIT_CODES


_VALUES = (0, 1, 2, 31, 32, 33, 64, 128, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def _mutated(choices: random.Random, good: bytes) -> bytearray:
    """One to three fields of the header, or of version 3's extension, say something else."""
    bad = bytearray(good)
    fields = range(4, 64, 4) if good[4] != 3 else (*range(4, 64, 4), *range(64, 320, 4))
    for _ in range(choices.randrange(1, 4)):
        at = choices.choice(fields)
        bad[at : at + 4] = choices.choice(_VALUES).to_bytes(4, "little")
    return bad


def _resealed(data: bytearray) -> bytearray:
    """As an attacker would leave it, who can compute plain digests."""
    try:
        extent = vlkv3.parse_extent(bytes(data[:320]), None)
    except SnapshotRejected:
        return data
    if extent.file_bytes != len(data):
        return data
    head, table = data[320 : extent.head_bytes], data[extent.table_offset : -ROOT_BYTES]
    seal = PlainSeal().for_file(extent.salt)
    table[:ENTRY_BYTES] = seal.close(0, memoryview(bytearray(head)))
    data[extent.table_offset :] = table + seal.root(bytes(data[:320]), memoryview(head), bytes(table))
    return data


def test_2000_hostile_files_of_each_version_are_judged_within_bounded_memory(sample: Sample) -> None:
    """Allocation never follows the header's numbers: at most the file's size and 1 MiB."""
    choices = random.Random(5)
    files = [_mutated(choices, sample.good) for _ in range(2_000)]
    if sample.version == 3:
        files = [_resealed(data) if number % 2 else data for number, data in enumerate(files)]
    tracemalloc.start()
    try:
        sample.verdict(sample.good)  # imports and caches are no one's fault
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for number, data in enumerate(files):
            assert sample.verdict(data, GEOMETRY if number % 2 else None) in {None, *EXIT_CODES}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= len(sample.good) + (1 << 20)


def test_100000_hostile_heads_meet_declared_refusals_and_claim_no_more_than_the_file_has(sample: Sample) -> None:
    """A third for each version. A head that passes speaks of exactly as many bytes as there are."""
    choices = random.Random(6)
    reasons: Counter[str] = Counter()
    for _ in range(33_334):
        data = _mutated(choices, sample.good)
        try:
            if sample.version == 3:
                extent = vlkv3.parse_extent(data, GEOMETRY if data[63] else None)
                vlkv3.check_size(extent, len(data))
                n_bytes, n_tokens = extent.file_bytes, extent.n_tokens
            else:
                header = vlkv.parse_header(data)
                vlkv.check_header(header, len(data), None, WHOLE_FILES)
                n_bytes = vlkv.file_bytes(header.geometry, header.file_n_tokens, header.version)
                n_tokens = header.file_n_tokens
        except SnapshotRejected as refusal:
            reasons[refusal.reason] += 1
            continue
        assert n_bytes == len(data)
        assert 4 * n_tokens < n_bytes
    assert reasons.total() > 20_000
    assert reasons.keys() <= EXIT_CODES.keys()
