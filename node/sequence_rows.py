"""A sequence of the engine's cache as the store sees it: rows, and where whole blocks lie, so that the disk reads and
writes them in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kernels.kv_read import read_rows, read_tiles
from kvferry.engine.kv_cache import KvKind, KvPool, KvSequence, Planes

_F32 = NDArray[np.float32]


class SequenceRows:
    """RowSource, RowSink, PlaneSource, PlaneSink, TileMemory, InPlaceReader. Restored rows count once committed.

    ``n_rows`` is how many will be restored: memory for all is taken at the first call, so that two threads may fill
    different layers afterwards. Raises OutOfKvMemory then.
    """

    def __init__(self, pool: KvPool | None, sequence: KvSequence, n_rows: int = 0) -> None:
        """``pool``: the sequence's; without it whole blocks are copied like others."""
        self._pool = pool
        self._sequence = sequence
        self._n_rows = n_rows
        self._memory = None if pool is None else pool.tiles.reshape(-1).view(np.uint8).data
        self._stride = 0 if pool is None else pool.block_bytes  # from a block to the next
        self._tile_bytes = 0 if pool is None else pool.block_bytes // pool.geometry.n_layers  # a layer's part of one

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
        """The memory of whole blocks, each contiguous, as the attention reads it (docs/vlkv-v3.md, "Tiles")."""
        if self._memory is None:
            return None
        self._sequence.reserve(self._n_rows)
        at = layer * self._tile_bytes
        blocks = self._sequence.block_table[first_block : first_block + n_blocks].tolist()
        starts = [at + block * self._stride for block in blocks]
        return [self._memory[start : start + self._tile_bytes] for start in starts]

    def read_tiles_in_place(
        self, fd: int, offset: int, layer: int, first_block: int, n_blocks: int, digests: memoryview
    ) -> bool:
        """Reads tiles that follow each other in a file and verifies them, without the GIL; whether all went well."""
        if self._pool is None:
            return False
        self._sequence.reserve(self._n_rows)
        geometry = self._pool.geometry
        n_tiles = 2 * geometry.n_kv_heads
        return bool(
            read_tiles(
                fd,
                offset,
                self._pool.address + layer * self._tile_bytes,
                self._stride,
                self._sequence.block_table[first_block : first_block + n_blocks],
                np.frombuffer(digests, np.uint8),
                n_tiles,
                self._tile_bytes // n_tiles,
                geometry.head_dim * geometry.block_size * geometry.kind.dtype.itemsize,
            )
        )

    def read_rows_in_place(self, fd: int, offset: int, layer: int, start: int, n_rows: int, block_size: int) -> bool:
        """The same for whole blocks of float32 rows as version 1 holds them."""
        if self._pool is None or self._pool.geometry.kind is not KvKind.F32:
            return False
        self._sequence.reserve(self._n_rows)
        table, head_dim = self._sequence.block_table, self._pool.geometry.head_dim
        return bool(read_rows(fd, offset, n_rows, block_size, self._pool.bits, layer, table, start, head_dim))
