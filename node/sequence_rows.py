"""A sequence of the engine's cache as the store sees it: rows, and where whole blocks lie, so that the disk reads and
writes them in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvPool, KvSequence, Planes

_F32 = NDArray[np.float32]


class SequenceRows:
    """RowSource, RowSink, PlaneSource, PlaneSink and TileMemory. Restored rows count once the caller commits them.

    ``n_rows`` is how many will be restored: memory for all is taken at the first call, so that two threads may fill
    different layers afterwards. Raises OutOfKvMemory then.
    """

    def __init__(self, pool: KvPool | None, sequence: KvSequence, n_rows: int = 0) -> None:
        """``pool``: the sequence's; without it whole blocks are copied like others."""
        self._pool = pool
        self._sequence = sequence
        self._n_rows = n_rows

    def read_rows(self, layer: int, start: int, stop: int, k_out: _F32, v_out: _F32) -> None:
        """Copies rows start..stop-1 of a layer out, float32 [stop - start, kv_dim]."""
        self._sequence.read_rows(layer, start, stop, k_out, v_out)

    def write_rows(self, layer: int, start: int, k: _F32, v: _F32) -> None:
        """Stages rows start.. of a layer, float32 [n, kv_dim]."""
        self._sequence.reserve(self._n_rows)
        self._sequence.write_rows(layer, start, k, v)

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """Copies rows start..stop-1 of a layer out as the cache holds them, whatever its kind."""
        self._sequence.read_planes(layer, start, stop, planes)

    def write_planes(self, layer: int, start: int, planes: Planes) -> None:
        """Stages rows start.. of a layer, as read_planes gave them."""
        self._sequence.reserve(self._n_rows)
        self._sequence.write_planes(layer, start, planes)

    def tile_buffers(self, layer: int, first_block: int, n_blocks: int) -> list[memoryview] | None:
        """The memory of whole blocks, each contiguous: K [nkv][hd][32], then V [nkv][32][hd]."""
        if self._pool is None:
            return None
        self._sequence.reserve(self._n_rows)
        tiles = self._pool.tiles
        blocks = self._sequence.block_table[first_block : first_block + n_blocks]
        return [tiles[block, layer].reshape(-1).view(np.uint8).data for block in blocks]
