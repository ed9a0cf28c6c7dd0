"""Making one segment of many: which of a chain's to merge, and its rows as the source of the new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.store.chain_reader import ChainReader
from kvferry.store.payload import Planes
from kvferry.store.segment_file import BlockDamagedError


class CheckedChain:
    """A chain as a source whose damage is a refusal, so that it is never written into another file."""

    def __init__(self, reader: ChainReader, tell: Callable[[], None] = lambda: None) -> None:
        self._reader = reader
        self._tell = tell

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """Copies rows out. Raises SnapshotRejected(block_digest_mismatch), and what reading raises."""
        self._tell()
        try:
            self._reader.read_planes(layer, start, stop, planes)
        except BlockDamagedError as damage:
            path = next(p.file.path for p in self._reader.parts if p.file.path.name == damage.name)
            raise damage.rejection(path) from damage


def plan_compaction(lengths: Sequence[int], most: int) -> range | None:
    """Which of a chain's segments (their lengths in tokens) to merge: the tail that is no longer than what would be
    gained, so that a row is written again only each time its segment at least doubles. None: nothing."""
    if len(lengths) <= most:
        return None
    first = 0
    while first < len(lengths) - 1 and lengths[first] >= sum(lengths[first + 1 :]):
        first += 1
    return range(first, len(lengths))
