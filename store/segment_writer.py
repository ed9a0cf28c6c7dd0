"""Writing a version 3 segment in one pass: head, rows, logits, digests, root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.store import vlkv, vlkv3
from kvferry.store.geometry import TokenIds
from kvferry.store.payload import Kind, Layout, PlaneSource, TileMemory, planes_of, tile_views, views
from kvferry.store.publish import TempFile
from kvferry.store.q8 import check_scales
from kvferry.store.seals import FileSeal, Seal, SealKind

# Rows gathered before a write. At 110 MB/s it is 18 ms of work, at 1 GB/s 2 ms.
RUN_BYTES: Final = 2 << 20
_IOV_MAX: Final = 1024


class SegmentWriter:
    """Writes one segment. Memory: RUN_BYTES and the digest table, whatever the segment's size."""

    def __init__(
        self,
        extent: vlkv3.Extent,
        token_ids: TokenIds,
        spans: Sequence[vlkv3.ContentSpan],
        seal: Seal,
        salt: bytes,
        logits: NDArray[np.float32] | None = None,
    ) -> None:
        """``extent`` without hash, seal, salt, spans and logits: they are filled in here. ids are the segment's own."""
        encrypted = seal.kind is SealKind.ENCRYPTED
        self.extent = replace(
            extent,
            token_hash=0 if encrypted else vlkv.fnv1a(token_ids),
            seal=seal.kind,
            key_id=seal.key_id,
            salt=salt,
            n_spans=len(spans),
            n_logits=0 if logits is None else len(logits),
        )
        ids = token_ids.astype("<i4", copy=False).tobytes()
        self._plain_head = ids + vlkv3.spans_data(spans)
        self._head = bytearray(self._plain_head)
        self._logits = logits
        self._seal: FileSeal = seal.for_file(salt)
        self._entries: list[bytes] = []
        block_bytes = extent.geometry.block_size * extent.row_bytes
        self._blocks_per_run = max(1, min(RUN_BYTES // block_bytes, _IOV_MAX))
        self._scratch = np.empty(self._blocks_per_run * block_bytes, np.uint8).data

    def write(self, temp: TempFile, rows: PlaneSource, tiles: TileMemory | None = None) -> int:
        """Streams the segment into the temp file; returns its inode once the bytes are durable.

        ``tiles``: where full blocks may be taken from as they lie, when the layout is tiles. Raises StoreFull,
        StoreUnavailable, SnapshotRejected(bad_scale).
        """
        extent = self.extent
        fixed = extent.pack()
        self._close(memoryview(self._head))
        temp.write([memoryview(fixed), memoryview(self._head)])
        runs = self._runs()
        for layer in range(extent.geometry.n_layers):
            for run in runs:
                pieces = self._tiles(tiles, layer, run)
                temp.write(self._gather(rows, layer, run) if pieces is None else pieces)
        if self._logits is not None:
            data = memoryview(bytearray(self._logits.astype("<f4").tobytes()))
            self._close(data)
            temp.write([data])
        table = b"".join(self._entries)
        temp.write([memoryview(table), memoryview(self._seal.root(fixed, memoryview(self._head), table))])
        return temp.finish(extent.file_bytes)

    def rewind(self) -> None:
        """Before it is written once more."""
        self._head = bytearray(self._plain_head)
        self._entries.clear()

    def _close(self, data: memoryview) -> None:
        self._entries.append(self._seal.close(len(self._entries), data))

    def _runs(self) -> list[range]:
        """Runs of blocks: full ones together, a part of a block alone."""
        first, end = self.extent.first_block, self.extent.first_block + self.extent.n_blocks
        full = [block for block in range(first, end) if self.extent.is_full(block)]
        runs = [] if full and full[0] == first else [range(first, first + 1)]
        for at in range(0, len(full), self._blocks_per_run):
            part = full[at : at + self._blocks_per_run]
            runs.append(range(part[0], part[-1] + 1))
        if end - 1 > first and not self.extent.is_full(end - 1):
            runs.append(range(end - 1, end))
        return runs

    def _tiles(self, tiles: TileMemory | None, layer: int, run: range) -> list[memoryview] | None:
        """The blocks where they lie in the source, if that can be."""
        if tiles is None or self._seal.changes_bytes or not self.extent.is_tile(run[0]):
            return None
        buffers = tiles.tile_buffers(layer, run[0], len(run))
        for buffer in buffers or ():
            self._close(buffer)
        return buffers

    def _gather(self, rows: PlaneSource, layer: int, run: range) -> list[memoryview]:
        """The blocks copied together."""
        extent, offset = self.extent, 0
        for block in run:
            start, stop = extent.rows_of_block(block)
            data = self._scratch[offset : offset + (stop - start) * extent.row_bytes]
            offset += len(data)
            if extent.is_tile(block):
                self._gather_tile(rows, layer, start, stop, data)
            else:
                planes = views(extent.kind, extent.geometry, data, stop - start)
                rows.read_planes(layer, start, stop, planes)
                if extent.kind is Kind.Q8:
                    check_scales(*planes[2:])
            self._close(data)
        return [self._scratch[:offset]]

    def _gather_tile(self, rows: PlaneSource, layer: int, start: int, stop: int, data: memoryview) -> None:
        extent = self.extent
        planes = tuple(
            np.empty((stop - start, plane.width), plane.dtype) for plane in planes_of(extent.kind, extent.geometry)
        )
        rows.read_planes(layer, start, stop, planes)
        for tile, plane in zip(tile_views(extent.kind, extent.geometry, data), planes, strict=True):
            tile[:] = plane.reshape(tile.shape)


def layout_for(kind: Kind, tiles: TileMemory | None) -> Layout:
    """Tiles when the source has them and the kind allows it."""
    return Layout.TILES if tiles is not None and kind.is_exact else Layout.ROWS
