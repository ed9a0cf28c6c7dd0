"""Reading the rows of a chain of segments: verified block by block, into rows or straight into the cache's tiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvferry.store.chains import Segment
from kvferry.store.errors import SnapshotRejected
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.payload import Kind, Planes, PlaneSink, TileMemory, empty_planes, row_bytes
from kvferry.store.segment_file import BlockDamagedError, SegmentFile, Terms, open_segment
from kvferry.store.workers import work_off

# Below this a thread costs more than it saves.
PARALLEL_BYTES: Final = 4 << 20
# Linux takes at most so many buffers in one call.
_IOV_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Rows start..stop-1 come from this file."""

    file: SegmentFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows start..stop-1 of a layer that one call reads: whole blocks but at the ends of a part."""

    layer: int
    part: Part
    start: int
    stop: int


class _Good:
    """How many rows are good in every layer read so far. Any thread."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.damages: list[BlockDamagedError] = []
        self._lock = threading.Lock()

    def lose(self, damage: BlockDamagedError) -> None:
        """Rows from there on are lost."""
        with self._lock:
            self.damages.append(damage)
            self.n_rows = min(self.n_rows, damage.position)


class ChainReader:
    """Open segments, one after the other; a PlaneSource of the whole chain. Use from one thread.

    ``run_bytes``: what one call reads. Memory: one run to read and one to hand on, for each of two threads.
    """

    def __init__(self, parts: Sequence[Part], geometry: KvGeometry, kind: Kind, run_bytes: int) -> None:
        self.parts = parts
        self.geometry = geometry
        self.kind = kind
        block_bytes = geometry.block_size * row_bytes(kind, geometry)
        self._blocks_per_run = max(1, min(run_bytes // block_bytes, _IOV_MAX))
        self._scratch_bytes = self._blocks_per_run * block_bytes
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

        After damage the restore goes on with the rows before it. With tiles, two threads read; the sink is then called
        from both, for different rows. The runs are taken in the order of the file, so that the system reads ahead.
        Raises as ``read_planes`` but for the damage.
        """
        good = _Good(n_rows)
        n_bytes = n_rows * self.geometry.n_layers * row_bytes(self.kind, self.geometry)
        work_off(
            self._runs(n_rows),
            lambda: self._worker(good, sink, tiles),
            parallel=tiles is not None and n_bytes >= PARALLEL_BYTES,
        )
        return good.n_rows, good.damages

    def _runs(self, n_rows: int) -> Iterator[_Run]:
        step = self._blocks_per_run * self.geometry.block_size
        for layer in range(self.geometry.n_layers):
            for part in self.parts:
                start, stop = part.start, min(part.stop, n_rows)
                while start < stop:
                    end = min(stop, start // self.geometry.block_size * self.geometry.block_size + step)
                    yield _Run(layer, part, start, end)
                    start = end

    def _worker(self, good: _Good, sink: PlaneSink, tiles: TileMemory | None) -> Callable[[_Run], None]:
        """Restores a run, with buffers of its own."""
        buffers = empty_planes(self.kind, self.geometry, self._blocks_per_run * self.geometry.block_size)
        scratch = _uncleared(self._scratch_bytes)

        def restore(run: _Run) -> None:
            while (stop := min(run.stop, good.n_rows)) > run.start:
                at = run.start
                try:
                    while at < stop:
                        end = self._into_tiles(run, at, stop, tiles)
                        if end == at:
                            end = self._rows_end(run.part, at, stop, has_tiles=tiles is not None)
                            planes = tuple(buffer[: end - at] for buffer in buffers)
                            run.part.file.read_rows(run.layer, at, end, planes, scratch)
                            sink.write_planes(run.layer, at, planes)
                        at = end
                except BlockDamagedError as damage:
                    good.lose(damage)
                else:
                    return

        return restore

    def _into_tiles(self, run: _Run, start: int, stop: int, tiles: TileMemory | None) -> int:
        """Reads the whole tiles from ``start`` on into the sink's memory; returns the position after them."""
        size, extent = self.geometry.block_size, run.part.file.extent
        first, end = start // size, stop // size
        if tiles is None or start % size or end <= first or not extent.is_tile(first):
            return start
        return end * size if run.part.file.read_tiles(run.layer, range(first, end), tiles) else start

    def _rows_end(self, part: Part, start: int, stop: int, *, has_tiles: bool) -> int:
        """How far copied rows go: with tiles in reach, only up to the next block that may be one."""
        size = self.geometry.block_size
        border = (start // size + 1) * size
        if has_tiles and start % size and border < stop and part.file.extent.is_tile(border // size):
            return border
        return stop


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
        yield ChainReader(parts, geometry, kind, fs.read_bytes)
