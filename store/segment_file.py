"""Reading version 3 segments: opened by exact name, head and root judged, blocks verified as they are read."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.store import vlkv, vlkv3
from kvferry.store.errors import SnapshotRejected
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry, TokenIds
from kvferry.store.payload import Kind, Layout, Planes, TileMemory, as_in_place_reader, tile_views, views
from kvferry.store.q8 import check_scales
from kvferry.store.reader import Identity, open_regular, read_exactly
from kvferry.store.seals import ENTRY_BYTES, ROOT_BYTES, FileSeal, PlainSeal, Seal, SealKind


@dataclass(frozen=True, slots=True)
class Terms:
    """What a reader takes: None leaves a field to the file. ``seal`` PlainSeal: files without a key, and only those."""

    geometry: KvGeometry | None = None
    kind: Kind | None = None
    fingerprint: str | None = None
    seal: Seal = PlainSeal()  # noqa: RUF009 -- it has no state
    vocab_size: int | None = None


class BlockDamagedError(Exception):
    """A block is not what the table says. ``position``: the first row that is lost with it; ``judged``: the file."""

    def __init__(self, name: str, layer: int, position: int, judged: Identity) -> None:
        super().__init__(f"{name}: the block of layer {layer} at position {position} is damaged")
        self.name = name
        self.layer = layer
        self.position = position
        self.judged = judged

    def rejection(self, path: Path) -> SnapshotRejected:
        """The same for whoever asked for rows."""
        refusal = SnapshotRejected(
            "block_digest_mismatch",
            f"the block of layer {self.layer} at position {self.position} is damaged; rows before it are good",
            path=path,
        )
        refusal.judged = self.judged
        return refusal


class SegmentFile:
    """An open segment whose head and root have been found good. Made by open_segment; use from one thread."""

    def __init__(
        self,
        fs: FileSystem,
        fd: int,
        path: Path,
        extent: vlkv3.Extent,
        identity: Identity,
        token_ids: TokenIds,
        spans: tuple[vlkv3.ContentSpan, ...],
        table: bytes,
        seal: FileSeal,
    ) -> None:
        self._fs = fs
        self._fd = fd
        self.path = path
        self.extent = extent
        self.identity = identity
        self.token_ids = token_ids
        self.spans = spans
        self.table = memoryview(table)
        self._seal = seal

    def read_rows(self, layer: int, start: int, stop: int, planes: Planes, scratch: memoryview) -> None:
        """Copies rows start..stop-1 (positions) of a layer into planes [stop - start, width], whole blocks verified.

        ``scratch`` holds at least one block. Raises BlockDamagedError, SnapshotGone, StoreUnavailable,
        SnapshotRejected(size_mismatch, bad_scale).
        """
        extent = self.extent
        for blocks in _runs(extent, start, stop, len(scratch)):
            self._read_run(layer, blocks, scratch)
            if self._copy_whole(blocks, start, stop, scratch, planes):
                continue
            offset = 0
            for block in blocks:
                first, last = extent.rows_of_block(block)
                data = scratch[offset : offset + (last - first) * extent.row_bytes]
                offset += len(data)
                a, b = max(start, first), min(stop, last)
                self._copy(data, block, (a - first, b - first), tuple(p[a - start : b - start] for p in planes))
        if extent.kind is Kind.Q8:
            self._check_scales(*planes[2:])

    def _copy_whole(self, blocks: range, start: int, stop: int, scratch: memoryview, planes: Planes) -> bool:
        """Copies a run of full blocks of rows when all of it is wanted: a call a plane instead of a call a block."""
        extent, size, n = self.extent, self.extent.geometry.block_size, len(blocks)
        first, last = blocks[0] * size, (blocks[-1] + 1) * size
        if n < 2 or extent.layout is Layout.TILES or first < max(start, extent.start) or last > min(stop, extent.end):
            return False
        parts = [plane[first - start : last - start] for plane in planes]
        if not all(part.flags.c_contiguous for part in parts):
            return False
        data = np.frombuffer(scratch[: n * size * extent.row_bytes], np.uint8).reshape(n, -1)
        offset = 0
        for part in parts:
            n_bytes = part.nbytes // n
            part.view(np.uint8).reshape(n, n_bytes)[:] = data[:, offset : offset + n_bytes]
            offset += n_bytes
        return True

    def _copy(self, data: memoryview, block: int, part: tuple[int, int], out: Planes) -> None:
        extent = self.extent
        rows = slice(*part)
        if extent.is_tile(block):
            for plane, tile in zip(out, tile_views(extent.kind, extent.geometry, data), strict=True):
                plane.reshape(-1, *tile.shape[1:])[:] = tile[rows]
            return
        first, last = extent.rows_of_block(block)
        found = views(extent.kind, extent.geometry, data, last - first)
        for plane, array in zip(out, found, strict=True):
            plane[:] = array[rows]

    def _read_run(self, layer: int, blocks: range, scratch: memoryview) -> None:
        """Reads consecutive blocks into scratch, side by side, and opens each."""
        pieces, offset = [], 0
        for block in blocks:
            first, last = self.extent.rows_of_block(block)
            n = (last - first) * self.extent.row_bytes
            pieces.append(scratch[offset : offset + n])
            offset += n
        at = self.extent.block_offset(layer, blocks[0])
        read_exactly(self._fs, self._fd, [scratch[:offset]], at, self.path)
        self._open_blocks(layer, blocks, pieces)

    def read_tiles(self, layer: int, blocks: range, tiles: TileMemory) -> bool:
        """Reads tiles straight into the reader's own memory, and verifies them there; False when it has none for them.

        Raises as ``read_rows``.
        """
        if self._read_in_place(layer, blocks, tiles):
            return True
        buffers = tiles.tile_buffers(layer, blocks[0], len(blocks))
        if buffers is None:
            return False
        read_exactly(self._fs, self._fd, buffers, self.extent.block_offset(layer, blocks[0]), self.path)
        self._open_blocks(layer, blocks, buffers)
        if self.extent.kind is Kind.Q8:
            for buffer in buffers:
                self._check_scales(*tile_views(self.extent.kind, self.extent.geometry, buffer)[2:])
        return True

    def _read_in_place(self, layer: int, blocks: range, tiles: TileMemory) -> bool:
        reader = as_in_place_reader(tiles)
        if reader is None or not (self._fs.has_descriptors and self._seal.is_xxh3):
            return False
        index = self.extent.entry_index(layer, blocks[0])
        digests = self.table[index * ENTRY_BYTES : (index + len(blocks)) * ENTRY_BYTES]
        offset = self.extent.block_offset(layer, blocks[0])
        return reader.read_tiles_in_place(self._fd, offset, layer, blocks[0], len(blocks), digests)

    def _check_scales(self, *scales: NDArray[np.float32]) -> None:
        try:
            check_scales(*scales)
        except SnapshotRejected as error:
            raise error.at(self.path) from None

    def _open_blocks(self, layer: int, blocks: range, pieces: Sequence[memoryview]) -> None:
        index = self.extent.entry_index(layer, blocks[0])
        table, is_open = self.table, self._seal.open
        for offset, piece in enumerate(pieces):
            at = (index + offset) * ENTRY_BYTES
            if not is_open(index + offset, piece, table[at : at + ENTRY_BYTES]):
                position = self.extent.rows_of_block(blocks[offset])[0]
                raise BlockDamagedError(self.path.name, layer, position, self.identity)

    def logits(self) -> NDArray[np.float32] | None:
        """The logits of the last position, float32 [vocab], if the file has them. Raises SnapshotRejected."""
        extent = self.extent
        if not extent.n_logits:
            return None
        out: NDArray[Any] = np.empty(extent.n_logits, "<f4")
        data = out.data.cast("B")
        read_exactly(self._fs, self._fd, [data], extent.logits_offset, self.path)
        index = extent.n_entries - 1
        if not self._seal.open(index, data, self.table[index * ENTRY_BYTES :]):
            raise SnapshotRejected("block_digest_mismatch", "its logits are damaged", path=self.path)
        return out

    def damaged_blocks(self, on_read: Any = None) -> list[BlockDamagedError]:
        """Reads every block; the damaged ones, in file order. ``on_read(n_bytes)`` may slow it down."""
        extent = self.extent
        scratch = memoryview(bytearray(extent.geometry.block_size * extent.row_bytes))
        found = []
        for layer in range(extent.geometry.n_layers):
            for block in range(extent.first_block, extent.first_block + extent.n_blocks):
                try:
                    self._read_run(layer, range(block, block + 1), scratch)
                except BlockDamagedError as damage:
                    found.append(damage)
                if on_read is not None:
                    first, stop = extent.rows_of_block(block)
                    on_read((stop - first) * extent.row_bytes)
        return found


def _runs(extent: vlkv3.Extent, start: int, stop: int, n_bytes: int) -> Iterator[range]:
    """Runs of the blocks that hold rows start..stop-1, each of at most n_bytes."""
    size = extent.geometry.block_size
    step = max(1, n_bytes // (size * extent.row_bytes))
    end = -(-stop // size)
    for first in range(start // size, end, step):
        yield range(first, min(first + step, end))


@contextmanager
def open_segment(
    fs: FileSystem, path: Path, terms: Terms, trusted_uids: frozenset[int] | None = None
) -> Iterator[SegmentFile]:
    """Opens a segment and judges all of it but its rows. Raises SnapshotRejected, SnapshotGone, StoreUnavailable."""
    with open_regular(fs, path, trusted_uids) as (fd, identity):
        try:
            segment = _judged(fs, fd, path, identity, terms)
        except SnapshotRejected as error:
            raise error.at(path) from None
        yield segment


def _judged(fs: FileSystem, fd: int, path: Path, identity: Identity, terms: Terms) -> SegmentFile:
    fixed = bytearray(min(vlkv3.FIXED_BYTES, identity.n_bytes))
    if fixed:
        read_exactly(fs, fd, [memoryview(fixed)], 0, path)
    extent = vlkv3.parse_extent(bytes(fixed), terms.geometry)
    vlkv3.check_size(extent, identity.n_bytes)
    _check_terms(extent, terms)
    head = bytearray(extent.head_bytes - vlkv3.FIXED_BYTES)
    read_exactly(fs, fd, [memoryview(head)], vlkv3.FIXED_BYTES, path)
    tail = bytearray(identity.n_bytes - extent.table_offset)
    read_exactly(fs, fd, [memoryview(tail)], extent.table_offset, path)
    table, root = bytes(tail[:-ROOT_BYTES]), bytes(tail[-ROOT_BYTES:])
    seal = terms.seal.for_file(extent.salt)
    if not hmac.compare_digest(seal.root(bytes(fixed), memoryview(head), table), root):
        raise SnapshotRejected("head_digest_mismatch", "header, ids or digests are not what the root digest says")
    if not seal.open(0, memoryview(head), table[:ENTRY_BYTES]):
        raise SnapshotRejected("head_digest_mismatch", "the ids are not what their digest says")
    ids = np.frombuffer(bytes(head[: vlkv.ID_BYTES * extent.n_tokens]), "<i4")
    spans = vlkv3.parse_spans(bytes(head[vlkv.ID_BYTES * extent.n_tokens :]), extent)
    _check_ids(extent, ids, terms.vocab_size, path.name)
    return SegmentFile(fs, fd, path, extent, identity, ids, spans, table, seal)


def _check_terms(extent: vlkv3.Extent, terms: Terms) -> None:
    if terms.fingerprint is not None and extent.fingerprint != terms.fingerprint:
        raise SnapshotRejected(
            "fingerprint_mismatch", f"it was made by {extent.fingerprint}, the model is {terms.fingerprint}"
        )
    if terms.kind is not None and extent.kind is not terms.kind:
        lossy = "" if extent.kind.is_exact else ", which are lossy,"
        raise SnapshotRejected(
            "payload_mismatch", f"it has {extent.kind.name} rows{lossy} where {terms.kind.name} rows are asked for"
        )
    if (extent.seal, extent.key_id) != (terms.seal.kind, terms.seal.key_id):
        raise SnapshotRejected(
            "key_mismatch",
            f"it is sealed as {extent.seal.name} with key {extent.key_id.hex()},"
            f" the reader's is {terms.seal.kind.name} with {terms.seal.key_id.hex()}",
        )


def _check_ids(extent: vlkv3.Extent, ids: TokenIds, vocab_size: int | None, name: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise SnapshotRejected("token_out_of_vocab", f"token id {low if low < 0 else high} is not in the vocabulary")
    if extent.token_hash != (0 if extent.seal is SealKind.ENCRYPTED else vlkv.fnv1a(ids)):
        raise SnapshotRejected("token_hash_mismatch", "its token ids do not hash to the header's hash")
    if name != extent.name:
        raise SnapshotRejected("filename_hash_mismatch", f"it is named {name}, its digests call for {extent.name}")
