"""The codec of version 3 against its document: the worked example to the byte, sizes, bounds, and hostile heads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvferry.store import vlkv, vlkv3
from kvferry.store.errors import SnapshotRejected
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.payload import Kind, Layout, from_q4, to_q4
from kvferry.store.seals import EncryptedSeal, KeyedSeal, PlainSeal, hkdf
from kvferry.store.segment_file import Terms, open_segment
from kvferry.store.snapshot_store import SnapshotStore
from kvferry.store.vlkv3 import ContentSpan

DOCUMENT = Path(__file__).parents[2] / "docs" / "vlkv-v3.md"
EXAMPLE = KvGeometry(1, 1, 2, 16)
TINY = KvGeometry(2, 2, 4)


def _published(root: Path, geometry: KvGeometry, ids: list[int], rows: MemoryRows, **options) -> Path:
    store = SnapshotStore(root, "feed", geometry, 1024, 1 << 30, 100, "node-1", version=3, **options)
    return store.path / store.publish(ids, rows).name


@pytest.fixture
def example(tmp_path: Path) -> Path:
    k = np.array([[[1, 2], [3, 4]]], np.float32)
    return _published(tmp_path, EXAMPLE, [5, 6], MemoryRows(k, -k))


def test_the_worked_example_of_the_document_to_the_byte(example: Path) -> None:
    text = DOCUMENT.read_text()
    block = text[text.index("```hex\n") + 7 : text.rindex("```")]
    documented = bytes.fromhex("".join(re.sub(r"^.*?:", "", line) for line in block.splitlines()))
    assert example.read_bytes() == documented
    assert example.name in text


@pytest.mark.parametrize(("layers", "heads", "hd"), [(28, 8, 128), (36, 8, 128), (48, 4, 128)])
@pytest.mark.parametrize("kind", list(Kind))
def test_a_segment_has_the_size_that_the_document_says(layers: int, heads: int, hd: int, kind: Kind) -> None:
    geometry = KvGeometry(layers, heads, hd)
    d = geometry.kv_dim
    per_row = {Kind.F32: 8 * d, Kind.F16: 4 * d, Kind.Q8: 2 * d + 8 * heads, Kind.Q4: d + 8 * d // 32}[kind]
    for start, n in ((0, 1), (0, 8192), (31, 1), (31, 2), (100, 8092)):
        extent = vlkv3.Extent(
            geometry=geometry, kind=kind, layout=Layout.ROWS, start=start, n_tokens=n, fingerprint="f",
            parent=b"p" * 32 if start else vlkv3.NO_PARENT, prefix=b"q" * 32,
        )  # fmt: skip
        n_blocks = (start + n - 1) // 32 - start // 32 + 1
        assert extent.n_blocks == n_blocks
        assert extent.file_bytes == 320 + 4 * n + layers * n * per_row + 16 * (1 + layers * n_blocks) + 32
        assert vlkv3.parse_extent(extent.pack(), geometry) == extent


def test_the_prefix_digest_is_the_documents() -> None:
    import hashlib

    span = ContentSpan(1, 2, b"c" * 32)
    data = b"kvferry prefix 3" + b"feed".ljust(64, b"\0") + (2).to_bytes(8, "little")
    data += np.array([5, 6], "<i4").tobytes() + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"c" * 32
    ids = np.array([5, 6], np.int32)
    later = ContentSpan(2, 2, b"d" * 32)
    assert vlkv3.prefix_digest(PlainSeal(), "feed", ids, [span, later]) == hashlib.sha256(data).digest()


def test_hkdf_is_that_of_rfc_5869() -> None:
    key, salt, info = b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA))
    assert hkdf(key, salt, info).hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_q4_loses_at_most_half_a_step() -> None:
    rows = np.random.default_rng(3).standard_normal((5, 64), np.float32)
    values, scales = to_q4(rows)
    assert values.shape == (5, 32)
    error = np.abs(from_q4(values, scales) - rows).reshape(5, 2, 32).max(axis=-1)
    assert (error <= scales * 0.5001).all()


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Rows 0..69 of a small geometry: whole blocks and a part of one."""
    k = np.random.default_rng(1).standard_normal((2, 70, 8), np.float32)
    return _published(tmp_path, TINY, list(range(1, 71)), MemoryRows(k, -k))


def _judge(path: Path, data: bytes, terms: Terms = Terms(TINY, Kind.F32, "feed", vocab_size=1024)) -> str | None:  # noqa: B008
    """What a reader says of these bytes: a refusal's reason, 'damaged' for a block, None when all is good."""
    path.unlink()
    path.write_bytes(data)
    try:
        with open_segment(PosixFileSystem(), path, terms) as file:
            return "damaged" if file.damaged_blocks() else None
    except SnapshotRejected as error:
        return error.reason


def test_every_flipped_bit_of_the_head_is_refused(segment: Path) -> None:
    good = segment.read_bytes()
    assert _judge(segment, good) is None
    for at in range(vlkv3.FIXED_BYTES):
        for bit in range(8):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            assert _judge(segment, bytes(bad)) not in {None, "damaged"}, (at, bit)


def test_every_flipped_byte_behind_it_is_found(segment: Path) -> None:
    good = segment.read_bytes()
    extent = vlkv3.parse_extent(good, TINY)
    for at in (*range(vlkv3.FIXED_BYTES, len(good), 5), *range(len(good) - 40, len(good))):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        in_rows = extent.head_bytes <= at < extent.table_offset
        assert _judge(segment, bytes(bad)) == ("damaged" if in_rows else "head_digest_mismatch"), at


KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.mark.parametrize("seal", [KeyedSeal, EncryptedSeal])
def test_a_node_with_a_key_refuses_what_does_not_verify(seal, tmp_path: Path) -> None:
    k = np.random.default_rng(1).standard_normal((2, 70, 8), np.float32)
    ids = list(range(1, 71))
    sealed = _published(tmp_path / "a", TINY, ids, MemoryRows(k, -k), seal=seal(KEY))
    plain = _published(tmp_path / "b", TINY, ids, MemoryRows(k, -k))
    good = sealed.read_bytes()

    def terms(its):
        return Terms(TINY, Kind.F32, "feed", its, 1024)

    assert _judge(sealed, good, terms(seal(KEY))) is None
    assert _judge(sealed, good, terms(seal(OTHER))) == "key_mismatch"
    assert _judge(sealed, good, terms(PlainSeal())) == "key_mismatch"
    assert _judge(plain, plain.read_bytes(), terms(seal(KEY))) == "key_mismatch"
    forged = bytearray(good)  # somebody without the key changes a row and all digests that need none
    forged[vlkv3.parse_extent(good, TINY).head_bytes] ^= 1
    assert _judge(sealed, bytes(forged), terms(seal(KEY))) == "damaged"
    claims = bytearray(good)
    claims[208:216] = seal(OTHER).key_id
    assert _judge(sealed, bytes(claims), terms(seal(OTHER))) == "head_digest_mismatch"


def test_encrypted_files_show_neither_ids_nor_rows_and_no_two_are_alike(tmp_path: Path) -> None:
    k = np.zeros((2, 70, 8), np.float32)
    files = [
        _published(tmp_path / name, TINY, list(range(1, 71)), MemoryRows(k, k), seal=EncryptedSeal(KEY)).read_bytes()
        for name in ("a", "b")
    ]
    ids = np.arange(1, 71, dtype="<i4")
    assert all(ids[:4].tobytes() not in data and bytes(64) not in data[320:] for data in files)
    assert files[0][32:40] == bytes(8)
    assert vlkv.fnv1a(ids).to_bytes(8, "little") not in files[0]
    assert files[0][320:] != files[1][320:]


def test_a_short_key_is_a_wrong_setting() -> None:
    with pytest.raises(Exception, match="16 bytes"):
        KeyedSeal(b"short")
