"""A sequence of the engine's cache as the store sees it: rows, and where whole blocks lie, so that the disk reads and
writes them in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kernels.kv_read import read_rows, read_tiles
from kvferry.engine.kernels.layout import KV_BLOCK
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
        self._n_tiles = 0 if pool is None else 2 * pool.geometry.n_kv_heads  # in such a part
        self._n_values = 0  # bytes of a tile's values
        if pool is not None:
            self._n_values = pool.geometry.head_dim * KV_BLOCK * pool.geometry.kind.dtype.itemsize

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
        blocks = self._blocks(first_block, n_blocks)
        if self._memory is None or blocks is None:
            return None
        at = layer * self._tile_bytes
        starts = [at + block * self._stride for block in blocks.tolist()]
        return [self._memory[start : start + self._tile_bytes] for start in starts]

    def read_tiles_in_place(
        self, fd: int, offset: int, layer: int, first_block: int, n_blocks: int, digests: memoryview
    ) -> bool:
        """Reads tiles that follow each other in a file and verifies them, without the GIL; whether all went well."""
        blocks = self._blocks(first_block, n_blocks)
        if self._pool is None or blocks is None:
            return False
        n_tiles = self._n_tiles
        return bool(
            read_tiles(
                fd,
                offset,
                self._pool.address + layer * self._tile_bytes,
                self._stride,
                blocks,
                np.frombuffer(digests.toreadonly(), np.uint8),
                n_tiles,
                self._tile_bytes // n_tiles,
                self._n_values,
            )
        )

    def read_rows_in_place(self, fd: int, offset: int, layer: int, start: int, n_rows: int, block_size: int) -> bool:
        """The same for whole blocks of float32 rows as version 1 holds them."""
        if self._pool is None or self._pool.geometry.kind is not KvKind.F32:
            return False
        table = self._blocks(0, -(-(start + n_rows) // KV_BLOCK), first_row=start)
        if table is None:
            return False
        head_dim = self._pool.geometry.head_dim
        return bool(read_rows(fd, offset, n_rows, block_size, self._pool.bits, layer, table, start, head_dim))

    def _blocks(self, first_block: int, n_blocks: int, first_row: int | None = None) -> NDArray[np.int32] | None:
        """Numbers of blocks; None when not all are held, or when rows are to be restored where some count already.

        Whoever writes to addresses would write anywhere else. ``first_row``: of what is written, if not the first
        block's.
        """
        self._sequence.reserve(self._n_rows)
        row = first_block * KV_BLOCK if first_row is None else first_row
        blocks = self._sequence.block_table[first_block : first_block + n_blocks]
        restores = self._n_rows > 0
        return None if len(blocks) < n_blocks or (restores and row < self._sequence.n_rows) else blocks
