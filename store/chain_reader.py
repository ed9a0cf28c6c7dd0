"""Reading the rows of a chain of segments: verified block by block, into rows or straight into the cache's tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvferry.store.chains import Segment
from kvferry.store.errors import SnapshotRejected
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.payload import Kind, Planes, PlaneSink, TileMemory, planes_of, row_bytes
from kvferry.store.segment_file import BlockDamagedError, SegmentFile, Terms, open_segment

# Rows copied on their way to a sink without tiles; the reader's scratch has as much again.
RUN_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Rows start..stop-1 come from this file."""

    file: SegmentFile
    start: int
    stop: int


class ChainReader:
    """Open segments, one after the other; a PlaneSource of the whole chain. Use from one thread."""

    def __init__(self, parts: Sequence[Part], geometry: KvGeometry, kind: Kind) -> None:
        self.parts = parts
        self.geometry = geometry
        self.kind = kind
        block_bytes = geometry.block_size * row_bytes(kind, geometry)
        self._rows_per_run = max(1, RUN_BYTES // block_bytes) * geometry.block_size
        self._scratch = memoryview(bytearray(max(1, RUN_BYTES // block_bytes) * block_bytes))

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """Copies rows out. Raises BlockDamagedError, SnapshotRejected, SnapshotGone, StoreUnavailable."""
        for part in self.parts:
            a, b = max(start, part.start), min(stop, part.stop)
            if a < b:
                part.file.read_rows(layer, a, b, tuple(p[a - start : b - start] for p in planes), self._scratch)

    def restore(self, n_rows: int, sink: PlaneSink, tiles: TileMemory | None) -> tuple[int, list[BlockDamagedError]]:
        """Hands rows to the sink, layer by layer; returns how many are good in every layer, and what was damaged.

        After damage the restore goes on with the rows before it. Raises as ``read_planes`` but for the damage.
        """
        n_good = n_rows
        damages: list[BlockDamagedError] = []
        buffers = tuple(
            np.empty((self._rows_per_run, plane.width), plane.dtype) for plane in planes_of(self.kind, self.geometry)
        )
        for layer in range(self.geometry.n_layers):
            while n_good:
                try:
                    self._restore_layer(layer, n_good, sink, tiles, buffers)
                    break
                except BlockDamagedError as damage:
                    damages.append(damage)
                    n_good = damage.position
        return n_good, damages

    def _restore_layer(
        self, layer: int, n_rows: int, sink: PlaneSink, tiles: TileMemory | None, buffers: Planes
    ) -> None:
        for part in self.parts:
            at, stop = part.start, min(part.stop, n_rows)
            while at < stop:
                end = self._into_tiles(part, layer, at, stop, tiles)
                if end == at:
                    end = self._rows_end(part, at, stop, has_tiles=tiles is not None)
                    planes = tuple(buffer[: end - at] for buffer in buffers)
                    part.file.read_rows(layer, at, end, planes, self._scratch)
                    sink.write_planes(layer, at, planes)
                at = end

    def _into_tiles(self, part: Part, layer: int, start: int, stop: int, tiles: TileMemory | None) -> int:
        """Reads the whole tiles from ``start`` on into the sink's memory; returns the position after them."""
        size, extent = self.geometry.block_size, part.file.extent
        first, end = start // size, stop // size
        if tiles is None or start % size or end <= first or not extent.is_tile(first):
            return start
        buffers = tiles.tile_buffers(layer, first, end - first)
        if buffers is None:
            return start
        part.file.read_tiles(layer, range(first, end), buffers)
        return end * size

    def _rows_end(self, part: Part, start: int, stop: int, *, has_tiles: bool) -> int:
        """How far one copied run goes: with tiles in reach, only up to the next block that may be one."""
        size = self.geometry.block_size
        border = (start // size + 1) * size
        if has_tiles and start % size and border < stop and part.file.extent.is_tile(border // size):
            return border
        return min(stop, start // size * size + self._rows_per_run, start + self._rows_per_run)


@contextmanager
def open_chain(
    fs: FileSystem,
    folder: Path,
    chain: Sequence[tuple[Segment, int]],
    terms: Terms,
    trusted_uids: frozenset[int] | None = None,
) -> Iterator[ChainReader]:
    """Opens all segments of a chain, each judged again; its ids are compared with the known ones, one by one.

    Raises SnapshotRejected (its path names the file), SnapshotGone, StoreUnavailable.
    """
    with ExitStack() as stack:
        parts, start = [], 0
        for segment, stop in chain:
            file = stack.enter_context(open_segment(fs, folder / segment.name, terms, trusted_uids))
            same = (file.extent.start, file.extent.parent, file.extent.prefix) == (
                segment.start,
                segment.parent,
                segment.prefix,
            )
            if not same or not np.array_equal(file.token_ids, segment.token_ids) or file.spans != segment.spans:
                raise SnapshotRejected(
                    "token_prefix_mismatch", "it is another file than the one that was found", path=file.path
                )
            parts.append(Part(file, start, stop))
            start = stop
        geometry, kind = parts[0].file.extent.geometry, parts[0].file.extent.kind
        yield ChainReader(parts, geometry, kind)
