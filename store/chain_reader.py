"""Reading the rows of a chain of segments: verified block by block, into rows or straight into the cache's tiles."""

from __future__ import annotations

import itertools
import threading
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
# Tiles asked of the sink at once: on a disk that gives 5 MB/s it still shows every second that it gets on.
TILE_RUN_BYTES: Final = 4 << 20
# Layers that the disk is told of before they are asked for: one for each thread, and one to be busy with.
LAYERS_AHEAD: Final = 3
# Below this a thread costs more than it saves.
PARALLEL_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Rows start..stop-1 come from this file."""

    file: SegmentFile
    start: int
    stop: int


class _Work:
    """Layers to restore, and what is known of the damage. Threads take layers by iterating."""

    def __init__(self, n_rows: int, n_layers: int) -> None:
        self.n_good = n_rows
        self.damages: list[BlockDamagedError] = []
        self.failure: BaseException | None = None
        self.stop = False
        self._lock = threading.Lock()
        self._layers = iter(range(n_layers))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            if self.stop or not self.n_good:
                raise StopIteration
            return next(self._layers)

    def found(self, damage: BlockDamagedError) -> None:
        """Rows from there on are lost."""
        with self._lock:
            self.damages.append(damage)
            self.n_good = min(self.n_good, damage.position)


class ChainReader:
    """Open segments, one after the other; a PlaneSource of the whole chain. Use from one thread."""

    def __init__(self, parts: Sequence[Part], geometry: KvGeometry, kind: Kind) -> None:
        self.parts = parts
        self.geometry = geometry
        self.kind = kind
        block_bytes = geometry.block_size * row_bytes(kind, geometry)
        self._rows_per_run = max(1, RUN_BYTES // block_bytes) * geometry.block_size
        self._tiles_per_call = max(1, TILE_RUN_BYTES // block_bytes)
        self._scratch_bytes = max(1, RUN_BYTES // block_bytes) * block_bytes
        self._scratch: memoryview | None = None

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """Copies rows out. Raises BlockDamagedError, SnapshotRejected, SnapshotGone, StoreUnavailable."""
        if self._scratch is None:
            self._scratch = _uncleared(self._scratch_bytes)
        for part in self.parts:
            a, b = max(start, part.start), min(stop, part.stop)
            if a < b:
                part.file.read_rows(layer, a, b, tuple(p[a - start : b - start] for p in planes), self._scratch)

    def restore(self, n_rows: int, sink: PlaneSink, tiles: TileMemory | None) -> tuple[int, list[BlockDamagedError]]:
        """Hands rows to the sink, layer by layer; returns how many are good in every layer, and what was damaged.

        After damage the restore goes on with the rows before it. With tiles, two threads read: one verifies and copies
        while the other waits for the disk; the sink is then called from both, for different layers. Raises as
        ``read_planes`` but for the damage.
        """
        work = _Work(n_rows, self.geometry.n_layers)
        self._restore_layers(work, sink, tiles, most=1)  # alone, so that the sink has all its memory when two come
        n_bytes = n_rows * self.geometry.n_layers * row_bytes(self.kind, self.geometry)
        helper = None
        if tiles is not None and n_bytes >= PARALLEL_BYTES:
            helper = threading.Thread(
                target=self._help, args=(work, sink, tiles), name="kvferry-restore", daemon=True
            )  # a daemon, for the disk may hang
            helper.start()
        try:
            self._restore_layers(work, sink, tiles)
        except BaseException:
            work.stop = True
            raise
        finally:
            if helper is not None:
                helper.join()
        if work.failure is not None:
            raise work.failure
        return work.n_good, work.damages

    def _help(self, work: _Work, sink: PlaneSink, tiles: TileMemory) -> None:
        try:
            self._restore_layers(work, sink, tiles)
        except BaseException as error:  # noqa: BLE001 -- it is raised again by the thread that was asked
            work.failure, work.stop = error, True

    def _restore_layers(self, work: _Work, sink: PlaneSink, tiles: TileMemory | None, most: int | None = None) -> None:
        buffers = tuple(
            np.empty((self._rows_per_run, plane.width), plane.dtype) for plane in planes_of(self.kind, self.geometry)
        )
        scratch = _uncleared(self._scratch_bytes)
        for layer in itertools.islice(work, most):
            for part in self.parts:
                part.file.will_read(layer + LAYERS_AHEAD, part.start, min(part.stop, work.n_good))
            while n_rows := work.n_good:
                try:
                    self._restore_layer(layer, n_rows, sink, tiles, buffers, scratch)
                    break
                except BlockDamagedError as damage:
                    work.found(damage)

    def _restore_layer(
        self,
        layer: int,
        n_rows: int,
        sink: PlaneSink,
        tiles: TileMemory | None,
        buffers: Planes,
        scratch: memoryview,
    ) -> None:
        for part in self.parts:
            at, stop = part.start, min(part.stop, n_rows)
            while at < stop:
                end = self._into_tiles(part, layer, at, stop, tiles)
                if end == at:
                    end = self._rows_end(part, at, stop, has_tiles=tiles is not None)
                    planes = tuple(buffer[: end - at] for buffer in buffers)
                    part.file.read_rows(layer, at, end, planes, scratch)
                    sink.write_planes(layer, at, planes)
                at = end

    def _into_tiles(self, part: Part, layer: int, start: int, stop: int, tiles: TileMemory | None) -> int:
        """Reads the whole tiles from ``start`` on into the sink's memory; returns the position after them."""
        size, extent = self.geometry.block_size, part.file.extent
        first = start // size
        end = min(stop // size, first + self._tiles_per_call)
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


def _uncleared(n_bytes: int) -> memoryview:
    """Memory that is written before it is read; clearing it would take longer than a small restore."""
    return np.empty(n_bytes, np.uint8).data


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
