"""VLKV as pure functions over bytes: the 64-byte header, the token hash, and where each row lies. Offsets live only
here.

The format document is docs/format.md. Nothing here opens a file or allocates by a number that a file claims.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.store.errors import SnapshotRejected
from kvferry.store.geometry import KvGeometry, TokenIds

MAGIC: Final = b"VKLV"  # the u32 0x564C4B56, little-endian
VERSION_F32: Final = 1
VERSION_Q8: Final = 2
HEADER_BYTES: Final = 64
ID_BYTES: Final = 4
VALUE_BYTES: Final = 4

FNV_BASIS: Final = 1469598103934665603  # the format's own; the textbook's has one more digit
FNV_PRIME: Final = 0x100000001B3
_MASK_64: Final = (1 << 64) - 1

# Largest claims believed when no model is at hand to compare with. Qwen3-30B-A3B, the biggest of the supported ones,
# has 48 layers, 4 KV heads of 128; the biggest open dense models have 126 layers and 16 KV heads; 256 is the widest
# head in use.
MAX_LAYERS: Final = 256
MAX_KV_HEADS: Final = 256
MAX_HEAD_DIM: Final = 1024
BLOCK_SIZES: Final = (16, 32, 64, 128)
MAX_TOKENS: Final = 1 << 20  # the longest context on offer is a million tokens; the reference server stops at 8,192

_HEADER: Final = struct.Struct("<4s7IQI20s")
_FIELDS: Final = (
    ("magic", 0, 4),
    ("version", 4, 4),
    ("n_layers", 8, 4),
    ("nkv", 12, 4),
    ("hd", 16, 4),
    ("kv_bs", 20, 4),
    ("file_n_tokens", 24, 4),
    ("kv_dim", 28, 4),
    ("token_hash", 32, 8),
    ("fmt", 40, 4),
    ("reserved", 44, 20),
)


@dataclass(frozen=True, slots=True)
class Header:
    """The header's fields under the names of the format document; not yet judged."""

    magic: bytes
    version: int
    n_layers: int
    nkv: int
    hd: int
    kv_bs: int
    file_n_tokens: int
    kv_dim: int
    token_hash: int
    fmt: int
    reserved: bytes

    @property
    def geometry(self) -> KvGeometry:
        """The geometry it claims."""
        return KvGeometry(self.n_layers, self.nkv, self.hd, self.kv_bs)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rows that lies in one piece, block after block: rows start..stop-1 of a layer at byte ``offset`` of
    the file.

    ``n_in_block`` is how many rows the file's block holds: the same as stop - start but for the last block of a
    partial read, where the rest of its K rows, then of its V rows, is skipped. Full blocks are merged into one
    segment.
    """

    layer: int
    start: int
    stop: int
    offset: int
    n_in_block: int


def fnv1a(token_ids: TokenIds) -> int:
    """FNV-1a 64 over the ids as little-endian int32, with the format's own basis. About 0.5 ms for 8,192 ids."""
    return _fnv1a(token_ids.astype("<i4", copy=False).tobytes())


@lru_cache(maxsize=8)  # the same ids are hashed when a file is written, met, and read
def _fnv1a(of: bytes) -> int:
    """Of any bytes.

    Byte b makes h into (h ^ b) * p = (h + d) * p, where d, what the exclusive or changes, lies in the lowest byte. So
    the hash is basis * p^n plus the sum of each d * p^(bytes from it on), and only the lowest bytes have to be followed
    one by one.
    """
    data = np.frombuffer(of, np.uint8)
    powers = np.multiply.accumulate(np.full(len(data), FNV_PRIME, np.uint64))[::-1]
    mixed = _mixed_lowest_bytes(data)
    changes = mixed.astype(np.int64) - (mixed ^ data)
    whole = int(powers[0]) if len(data) else 1
    return (FNV_BASIS * whole + int((changes.view(np.uint64) * powers).sum(dtype=np.uint64))) & _MASK_64


def _mixed_lowest_bytes(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The hash's lowest byte before each multiplication, exclusive-or-ed with the byte that comes.

    A product's bit depends on that bit of its odd factor and on the bits below. So bit by bit, from the lowest: each
    step turns it by the data's bit and by what the known bits below carry into it.
    """
    mixed = np.zeros(len(data), np.uint8)
    for bit in range(8):
        carried = (mixed * np.uint8(FNV_PRIME & 0xFF)) >> bit & 1
        turns = data >> bit & 1
        turns[1:] ^= carried[:-1]
        if len(turns):
            turns[0] ^= FNV_BASIS >> bit & 1
        mixed |= np.bitwise_xor.accumulate(turns) << bit
    return mixed


def file_name(token_hash: int) -> str:
    """The name of the snapshot whose token ids have this hash."""
    return f"kv_{token_hash:016x}.kv"


def token_bytes(geometry: KvGeometry) -> int:
    """Bytes that one token adds to a version 1 file: its id, and a K and a V row in every layer."""
    return ID_BYTES + geometry.n_layers * 2 * VALUE_BYTES * geometry.kv_dim


def q8_record_bytes(geometry: KvGeometry) -> int:
    """Bytes of one token in one layer of a version 2 file: K and V as int8, then a float32 scale per head of each."""
    return 2 * geometry.kv_dim + 2 * VALUE_BYTES * geometry.n_kv_heads


def file_bytes(geometry: KvGeometry, n_tokens: int, version: int = VERSION_F32) -> int:
    """Size of a version 1 or 2 file to the byte; Python integers, so no 32-bit wrap."""
    if version == VERSION_Q8:
        return HEADER_BYTES + n_tokens * (ID_BYTES + geometry.n_layers * q8_record_bytes(geometry))
    return HEADER_BYTES + n_tokens * token_bytes(geometry)


def build_header(geometry: KvGeometry, n_tokens: int, token_hash: int, version: int = VERSION_F32) -> bytes:
    """The 64 bytes of a version 1 or 2 header."""
    return _HEADER.pack(
        MAGIC,
        version,
        geometry.n_layers,
        geometry.n_kv_heads,
        geometry.head_dim,
        geometry.block_size,
        n_tokens,
        geometry.kv_dim,
        token_hash,
        0,
        bytes(20),
    )


def parse_header(data: bytes | memoryview) -> Header:
    """The fields of the first 64 bytes, unjudged. Raises SnapshotRejected(truncated_header) when there are fewer."""
    if len(data) < HEADER_BYTES:
        raise SnapshotRejected("truncated_header", f"{len(data)} bytes where the header has {HEADER_BYTES}")
    return Header(*_HEADER.unpack(bytes(data[:HEADER_BYTES])))


def header_fields(data: bytes | memoryview) -> Iterator[tuple[str, int, bytes]]:
    """(name, offset, raw bytes) of each field, for a person to look at."""
    for name, offset, size in _FIELDS:
        yield name, offset, bytes(data[offset : offset + size])


def check_header(
    header: Header, actual_bytes: int, expected: KvGeometry | None, versions: Collection[int] = (VERSION_F32,)
) -> None:
    """Judges a header against itself, against the model's geometry, and against the size of the file, in this order.

    Raises SnapshotRejected for the first thing that is wrong. Without ``expected`` the fields are held against bounds
    instead. ``versions`` are those that the caller can read.
    """
    _check_constants(header, versions)
    check_shape(header, expected)
    size = file_bytes(header.geometry, header.file_n_tokens, header.version)
    if size != actual_bytes:
        raise SnapshotRejected(
            "size_mismatch",
            f"{header.file_n_tokens} tokens of this geometry make {size} bytes, the file has {actual_bytes}",
        )
    if header.file_n_tokens > MAX_TOKENS:
        raise SnapshotRejected(
            "out_of_bounds:file_n_tokens", f"{header.file_n_tokens} tokens, at most {MAX_TOKENS} are read"
        )


def check_magic(header: Header) -> None:
    """Raises SnapshotRejected(bad_magic)."""
    if header.magic != MAGIC:
        raise SnapshotRejected("bad_magic", f"it starts with {header.magic.hex(' ')}, not {MAGIC.hex(' ')}")


def check_shape(header: Header, expected: KvGeometry | None) -> None:
    """Judges the geometry fields, which all versions have: against each other, the model's, and bounds.

    Raises SnapshotRejected.
    """
    _check_fields(header)
    if expected is not None:
        _check_geometry(header, expected)
    _check_bounds(header)


def _check_constants(header: Header, versions: Collection[int]) -> None:
    check_magic(header)
    if header.version not in versions:
        readable = " and ".join(str(version) for version in versions)
        raise SnapshotRejected("bad_version", f"version {header.version}, where version {readable} can be used")
    if header.fmt != 0:
        raise SnapshotRejected("bad_fmt", f"payload format {header.fmt}, not 0")
    if any(header.reserved):
        raise SnapshotRejected("reserved_not_zero", "its reserved bytes 44 to 63 are not all zero")


def _check_fields(header: Header) -> None:
    for field in ("n_layers", "nkv", "hd", "kv_bs", "file_n_tokens"):
        if getattr(header, field) == 0:
            raise SnapshotRejected("zero_field", f"{field} is 0")
    if header.kv_dim != header.nkv * header.hd:
        raise SnapshotRejected(
            "kv_dim_inconsistent", f"kv_dim {header.kv_dim} is not nkv {header.nkv} x hd {header.hd}"
        )


def _check_geometry(header: Header, expected: KvGeometry) -> None:
    wanted = (
        ("n_layers", expected.n_layers),
        ("nkv", expected.n_kv_heads),
        ("hd", expected.head_dim),
        ("kv_bs", expected.block_size),
        ("kv_dim", expected.kv_dim),
    )
    for field, value in wanted:
        if getattr(header, field) != value:
            raise SnapshotRejected(
                f"geometry_mismatch:{field}", f"{field} is {getattr(header, field)} where the model has {value}"
            )


def _check_bounds(header: Header) -> None:
    for field, most in (("n_layers", MAX_LAYERS), ("nkv", MAX_KV_HEADS), ("hd", MAX_HEAD_DIM)):
        if getattr(header, field) > most:
            raise SnapshotRejected(
                f"out_of_bounds:{field}", f"{field} is {getattr(header, field)}, at most {most} is read"
            )
    if header.kv_bs not in BLOCK_SIZES:
        raise SnapshotRejected("out_of_bounds:kv_bs", f"kv_bs is {header.kv_bs}, not one of {BLOCK_SIZES}")


def check_token_ids(header: Header, token_ids: TokenIds, vocab_size: int | None) -> None:
    """Judges a file's ids: the header's hash is theirs, and each is a token of the model.

    Raises SnapshotRejected(token_hash_mismatch or token_out_of_vocab).
    """
    actual = fnv1a(token_ids)
    if actual != header.token_hash:
        raise SnapshotRejected(
            "token_hash_mismatch", f"its token ids hash to {actual:016x}, its header says {header.token_hash:016x}"
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        wrong = low if low < 0 else high
        vocabulary = "any vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size}"
        raise SnapshotRejected("token_out_of_vocab", f"token id {wrong} is outside {vocabulary}")


def check_file_name(header: Header, name: str) -> None:
    """A file is named after its hash. Raises SnapshotRejected(filename_hash_mismatch)."""
    if name != file_name(header.token_hash):
        raise SnapshotRejected(
            "filename_hash_mismatch", f"it is named {name}, its token ids call for {file_name(header.token_hash)}"
        )


def ids_offset() -> int:
    """Where the token ids begin."""
    return HEADER_BYTES


def layer_offset(geometry: KvGeometry, n_tokens: int, layer: int) -> int:
    """Where a layer's first K row begins in a file of n_tokens."""
    return HEADER_BYTES + ID_BYTES * n_tokens + layer * n_tokens * 2 * VALUE_BYTES * geometry.kv_dim


def q8_record_offset(geometry: KvGeometry, n_tokens: int, layer: int, row: int) -> int:
    """Where a token's record of a layer begins in a version 2 file of n_tokens."""
    return HEADER_BYTES + ID_BYTES * n_tokens + (layer * n_tokens + row) * q8_record_bytes(geometry)


def segments(geometry: KvGeometry, n_tokens: int, n_rows: int, layer: int, max_rows: int) -> Iterator[Segment]:
    """Where the first n_rows of a layer lie in a file of n_tokens, in pieces of at most max_rows, by the file's own
    blocks.

    max_rows is a multiple of the block size.
    """
    block, pair = geometry.block_size, 2 * VALUE_BYTES * geometry.kv_dim
    base = layer_offset(geometry, n_tokens, layer)
    n_whole = n_rows // block * block
    for start in range(0, n_whole, max_rows):
        stop = min(start + max_rows, n_whole)
        yield Segment(layer, start, stop, base + start * pair, block)
    if n_whole < n_rows:
        yield Segment(layer, n_whole, n_rows, base + n_whole * pair, min(block, n_tokens - n_whole))
