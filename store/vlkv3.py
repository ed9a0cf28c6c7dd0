"""VLKV version 3 as pure functions over bytes: a segment's head, where its blocks lie, prefix digests, names.

The document is docs/vlkv-v3.md. Nothing here opens a file or allocates by a number that a file claims.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import numpy as np

from kvferry.store import vlkv
from kvferry.store.errors import SnapshotRejected
from kvferry.store.geometry import KvGeometry, TokenIds
from kvferry.store.payload import Kind, Layout, fits, row_bytes
from kvferry.store.seals import ENTRY_BYTES, NO_KEY, NO_SALT, ROOT_BYTES, Seal, SealKind

VERSION: Final = 3
EXTENSION_BYTES: Final = 256
FIXED_BYTES: Final = vlkv.HEADER_BYTES + EXTENSION_BYTES
SPAN_BYTES: Final = 40
DIGEST_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 64
HINT_BYTES: Final = 16
NO_PARENT: Final = bytes(DIGEST_BYTES)
FLAG_LOSSY: Final = 1
MAX_SPANS: Final = 1 << 16  # a context of a million tokens has no more pictures than that
MAX_LOGITS: Final = 1 << 20  # the largest vocabularies in use have 262,144 tokens

_FIELDS: Final = (("start", 44, 4), ("ext_bytes", 48, 4), ("flags", 52, 4), ("reserved", 56, 8))
_HEADER: Final = struct.Struct("<4s7IQI3I8s")
_EXTENSION: Final = struct.Struct("<64s32s32s4I8s16s16s72s")
_SPAN: Final = struct.Struct("<2I32s")


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """What stands behind placeholder tokens: absolute positions, and the SHA-256 of the content."""

    start: int
    length: int
    digest: bytes

    def pack(self) -> bytes:
        """Its 40 bytes."""
        return _SPAN.pack(self.start, self.length, self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What a segment's first 320 bytes say. Positions are absolute; block numbers are, too."""

    geometry: KvGeometry
    kind: Kind
    layout: Layout
    start: int
    n_tokens: int
    fingerprint: str
    parent: bytes
    prefix: bytes
    token_hash: int = 0
    seal: SealKind = SealKind.PLAIN
    key_id: bytes = NO_KEY
    salt: bytes = NO_SALT
    n_spans: int = 0
    n_logits: int = 0
    parent_hint: bytes = bytes(HINT_BYTES)

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.n_tokens

    @property
    def first_block(self) -> int:
        """Number of the block that the first row lies in."""
        return self.start // self.geometry.block_size

    @property
    def n_blocks(self) -> int:
        """Blocks of a layer, whole or in part."""
        return -(-self.end // self.geometry.block_size) - self.first_block

    @property
    def n_entries(self) -> int:
        """Entries of the digest table."""
        return 1 + self.geometry.n_layers * self.n_blocks + (self.n_logits > 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in one layer."""
        return row_bytes(self.kind, self.geometry)

    @property
    def head_bytes(self) -> int:
        """Bytes before the rows."""
        return FIXED_BYTES + vlkv.ID_BYTES * self.n_tokens + SPAN_BYTES * self.n_spans

    @property
    def logits_offset(self) -> int:
        """Where the logits begin, if there are any, else the table."""
        return self.head_bytes + self.geometry.n_layers * self.n_tokens * self.row_bytes

    @property
    def table_offset(self) -> int:
        """Where the digest table begins."""
        return self.logits_offset + vlkv.VALUE_BYTES * self.n_logits

    @property
    def file_bytes(self) -> int:
        """The file's size to the byte."""
        return self.table_offset + ENTRY_BYTES * self.n_entries + ROOT_BYTES

    @property
    def name(self) -> str:
        """The file's name."""
        return segment_name(self.parent, self.prefix, self.kind)

    def rows_of_block(self, block: int) -> tuple[int, int]:
        """First and end position of the part of a block that the segment has."""
        size = self.geometry.block_size
        return max(self.start, block * size), min(self.end, (block + 1) * size)

    def is_full(self, block: int) -> bool:
        """Whether the segment has all rows of a block."""
        start, stop = self.rows_of_block(block)
        return stop - start == self.geometry.block_size

    def is_tile(self, block: int) -> bool:
        """Whether a block is stored as a tile."""
        return self.layout is Layout.TILES and self.is_full(block)

    def block_offset(self, layer: int, block: int) -> int:
        """Where a block begins in the file."""
        start, _ = self.rows_of_block(block)
        return self.head_bytes + (layer * self.n_tokens + start - self.start) * self.row_bytes

    def entry_index(self, layer: int, block: int) -> int:
        """A block's place in the digest table."""
        return 1 + layer * self.n_blocks + block - self.first_block

    def describe(self) -> tuple[tuple[str, str], ...]:
        """Name and value of what the first 64 bytes do not say, for a person."""
        hint = name_of_hint(self.parent_hint) if self.start else "-"
        return (
            ("positions", f"{self.start} to {self.end - 1}"),
            ("rows", f"{self.kind.name}, {self.layout.name.lower()}" + ("" if self.kind.is_exact else ", LOSSY")),
            ("fingerprint", self.fingerprint),
            ("file name", self.name),
            ("parent", self.parent.hex() if self.start else "-"),
            ("prefix", self.prefix.hex()),
            ("parent hint", hint),
            ("seal", f"{self.seal.name.lower()}, key {self.key_id.hex()}"),
            ("spans", str(self.n_spans)),
            ("logits", str(self.n_logits)),
        )

    def pack(self) -> bytes:
        """The first 320 bytes."""
        g = self.geometry
        return _HEADER.pack(
            vlkv.MAGIC, VERSION, g.n_layers, g.n_kv_heads, g.head_dim, g.block_size, self.n_tokens, g.kv_dim,
            self.token_hash, self.kind, self.start, EXTENSION_BYTES, 0 if self.kind.is_exact else FLAG_LOSSY, bytes(8),
        ) + _EXTENSION.pack(
            self.fingerprint.encode("ascii"), self.parent, self.prefix, self.layout, self.seal, self.n_spans,
            self.n_logits, self.key_id, self.salt, self.parent_hint, bytes(72),
        )  # fmt: skip


def header_fields(data: bytes) -> Iterator[tuple[str, int, bytes]]:
    """(name, offset, raw bytes) of each field of the first 64 bytes."""
    yield from (field for field in vlkv.header_fields(data) if field[1] < 44)
    for name, offset, size in _FIELDS:
        yield name, offset, data[offset : offset + size]


def segment_name(parent: bytes, prefix: bytes, kind: Kind) -> str:
    """Name of the file that continues ``parent`` to ``prefix``."""
    return f"kv3_{hashlib.sha256(parent + prefix + int(kind).to_bytes(4, 'little')).hexdigest()[:32]}.kv"


def hint_of(name: str) -> bytes:
    """The 16 bytes that a segment's name is made of."""
    return bytes.fromhex(name[4:36])


def name_of_hint(hint: bytes) -> str:
    """The name that such 16 bytes stand for."""
    return f"kv3_{hint.hex()}.kv"


def prefix_digest(seal: Seal, fingerprint: str, ids: TokenIds, spans: Iterable[ContentSpan] = ()) -> bytes:
    """Digest of all that decides the rows of positions 0 to len(ids) - 1. 20 us for 8,192 ids."""
    parts = [
        b"kvferry prefix 3",
        fingerprint.encode("ascii").ljust(FINGERPRINT_BYTES, b"\0"),
        len(ids).to_bytes(8, "little"),
        ids.astype("<i4", copy=False).tobytes(),
        *(span.pack() for span in spans if span.start < len(ids)),
    ]
    return seal.prefix(b"".join(parts))


def identity_ids(ids: TokenIds, start: int, spans: Iterable[ContentSpan]) -> TokenIds:
    """Ids with the content in them, int32: what the index compares. ids[0] stands at position ``start``.

    A placeholder's id is replaced by a negative number from the content's digest and its place in it, so two pictures
    have different ones, but for one in two thousand million; ``first_difference`` compares the digests themselves.
    """
    told = list(spans)
    if not told:
        return ids
    out = np.array(ids, np.int32)
    for span in told:
        first, last = max(span.start, start), min(span.start + span.length, start + len(ids))
        if first < last:
            content = span.length.to_bytes(4, "little") + span.digest  # another length is another span
            words = np.frombuffer(hashlib.shake_256(content).digest(4 * (last - span.start)), "<u4")
            out[first - start : last - start] = -1 - (words[first - span.start :] >> 1).astype(np.int32)
    return out


def first_difference(left: Sequence[ContentSpan], right: Sequence[ContentSpan], n: int) -> int:
    """The first of n positions at which content begins that only one of them has there; n without one."""
    for one, other in zip_longest(left, right):
        start = min(span.start for span in (one, other) if span is not None)
        if one != other or start >= n:
            return min(start, n)
    return n


def spans_data(spans: Sequence[ContentSpan]) -> bytes:
    """All spans, packed."""
    return b"".join(span.pack() for span in spans)


def parse_spans(data: bytes | memoryview, extent: Extent) -> tuple[ContentSpan, ...]:
    """Raises SnapshotRejected(extension_malformed) when they are not in order, or begin elsewhere."""
    spans = tuple(ContentSpan(*_SPAN.unpack_from(data, SPAN_BYTES * i)) for i in range(extent.n_spans))
    free_from = extent.start
    for span in spans:
        if not (free_from <= span.start < extent.end and span.length > 0):
            raise SnapshotRejected("extension_malformed", f"a content span at {span.start} is out of order")
        free_from = span.start + span.length
    return spans


def parse_extent(data: bytes | memoryview, expected: KvGeometry | None) -> Extent:
    """Judges the first 320 bytes against themselves and the model's geometry.

    Raises SnapshotRejected for the first thing that is wrong.
    """
    if len(data) < FIXED_BYTES:
        raise SnapshotRejected("truncated_header", f"{len(data)} bytes where a version 3 head has {FIXED_BYTES}")
    header = vlkv.parse_header(data)
    vlkv.check_magic(header)
    if header.version != VERSION:
        raise SnapshotRejected("bad_version", f"version {header.version}, not {VERSION}")
    vlkv.check_shape(header, expected)
    *_, start, ext_bytes, flags, reserved = _HEADER.unpack(data[: vlkv.HEADER_BYTES])
    return _parse_extension(header, start, (ext_bytes, flags, reserved), data)


def _parse_extension(header: vlkv.Header, start: int, rest: tuple[int, int, bytes], data: bytes | memoryview) -> Extent:
    (name, parent, prefix, layout, seal, n_spans, n_logits, key_id, salt, hint, reserved) = _EXTENSION.unpack(
        data[vlkv.HEADER_BYTES : FIXED_BYTES]
    )
    ext_bytes, flags, reserved_0 = rest
    lossy = header.fmt == Kind.Q4
    _demand(header.fmt <= max(Kind), f"there are no rows of kind {header.fmt}", "bad_fmt")
    _demand(not (any(reserved) or any(reserved_0)), "a reserved byte is not zero", "reserved_not_zero")
    _demand(ext_bytes == EXTENSION_BYTES, f"its extension header has {ext_bytes} bytes, not {EXTENSION_BYTES}")
    _demand(flags == (FLAG_LOSSY if lossy else 0), f"flags {flags:#x} do not go with rows of kind {header.fmt}")
    _demand(layout <= max(Layout) and seal <= max(SealKind), f"layout {layout} or seal {seal} is not known")
    _demand((start == 0) == (parent == NO_PARENT), "it starts at 0 and has a parent, or neither")
    _demand((start > 0) or not any(hint), "it starts at 0 and hints at a parent")
    _demand((seal == SealKind.PLAIN) == (key_id == NO_KEY), "seal and key id do not go together")
    _demand(seal == SealKind.ENCRYPTED or salt == NO_SALT, "it has a salt and is not encrypted")
    _demand(n_spans <= MAX_SPANS and n_logits <= MAX_LOGITS, f"{n_spans} spans or {n_logits} logits are too many")
    _demand(
        start + header.file_n_tokens <= vlkv.MAX_TOKENS,
        f"it ends at {start + header.file_n_tokens}, at most {vlkv.MAX_TOKENS} is read",
        "out_of_bounds:file_n_tokens",
    )
    _demand(fits(Kind(header.fmt), Layout(layout), header.geometry), "there are no such blocks of this geometry")
    fingerprint = name.rstrip(b"\0")
    _demand(fingerprint.isalnum() or fingerprint.replace(b"-", b"").replace(b"_", b"").isalnum(), "no fingerprint")
    return Extent(
        geometry=header.geometry,
        kind=Kind(header.fmt),
        layout=Layout(layout),
        start=start,
        n_tokens=header.file_n_tokens,
        fingerprint=fingerprint.decode("ascii"),
        parent=parent,
        prefix=prefix,
        token_hash=header.token_hash,
        seal=SealKind(seal),
        key_id=key_id,
        salt=salt,
        n_spans=n_spans,
        n_logits=n_logits,
        parent_hint=hint,
    )


def _demand(holds: bool, detail: str, reason: str = "extension_malformed") -> None:
    if not holds:
        raise SnapshotRejected(reason, detail)


def check_size(extent: Extent, actual_bytes: int) -> None:
    """Raises SnapshotRejected(size_mismatch)."""
    if extent.file_bytes != actual_bytes:
        raise SnapshotRejected(
            "size_mismatch", f"its header calls for {extent.file_bytes} bytes, the file has {actual_bytes}"
        )
