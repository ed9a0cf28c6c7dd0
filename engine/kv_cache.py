"""The KV cache: one pool of blocks, and sequences that hold blocks of it.

A block is 32 positions of all layers. Blocks are reference-counted: a fork shares the full blocks of its prefix. A row
that counts is never written again, so shared blocks need no copy on write; only the partial last block is copied.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import OutOfKvMemory
from kvferry.engine.kernels.layout import CACHE_LINE, FLOAT_BYTES, KV_BLOCK

_F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The shape of cached rows. A row of K (or V) in one layer has n_kv_heads * head_dim elements."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_size: int = KV_BLOCK

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers for ``block_size`` positions, float32."""
        return self.n_layers * 2 * self.kv_dim * self.block_size * FLOAT_BYTES


class KvPool:
    """All KV memory of an engine, allocated once. Pages are touched only when rows are written.

    Thread-safe: any thread may allocate and release. Raises OutOfKvMemory when not even one block fits ``n_bytes``.
    """

    def __init__(self, geometry: KvGeometry, n_bytes: int) -> None:
        self.geometry: Final = geometry
        self.block_bytes: Final = geometry.block_bytes
        self.n_blocks: Final = n_bytes // self.block_bytes
        if self.n_blocks < 1:
            raise OutOfKvMemory(
                f"{n_bytes} bytes of KV memory hold no block of {self.block_bytes} bytes; give the engine more memory"
            )
        self._lock = threading.Lock()
        self._references: NDArray[np.int32] = np.zeros(self.n_blocks, np.int32)
        self._free = list(range(self.n_blocks - 1, -1, -1))
        raw = np.empty(self.n_blocks * self.block_bytes + CACHE_LINE, np.uint8)
        start = -raw.ctypes.data % CACHE_LINE
        body = raw[start : start + self.n_blocks * self.block_bytes].view(np.float32)
        tile = geometry.head_dim * KV_BLOCK
        shape = (self.n_blocks, geometry.n_layers, 2, geometry.n_kv_heads, tile)
        self.tiles: Final[_F32] = body.reshape(
            shape
        )  # K tile: [head_dim, 32]; V tile: [32, head_dim] (kernels/layout.py)

    @property
    def n_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, all or none. Raises OutOfKvMemory."""
        with self._lock:
            if count > len(self._free):
                raise OutOfKvMemory(
                    f"{count} KV blocks are needed and {len(self._free)} of {self.n_blocks} are free; "
                    "release a sequence or give the engine more KV memory"
                )
            blocks = [self._free.pop() for _ in range(count)]
            self._references[blocks] = 1
            return blocks

    def share(self, blocks: list[int]) -> None:
        with self._lock:
            self._references[blocks] += 1

    def release(self, blocks: list[int]) -> None:
        with self._lock:
            for block in blocks:
                self._references[block] -= 1
                if self._references[block] == 0:
                    self._free.append(block)


class KvSequence:
    """The rows of one sequence of tokens: ``n_rows`` count; more may be staged beyond them and committed later.

    One thread at a time may change a sequence. Rows that count never change, so other threads may read them meanwhile.
    """

    def __init__(self, pool: KvPool, blocks: list[int] | None = None, n_rows: int = 0) -> None:
        self._pool = pool
        self._blocks = blocks or []
        self._table: NDArray[np.int32] = np.array(self._blocks, dtype=np.int32)
        self._n_rows = n_rows
        self._released = False

    @property
    def n_rows(self) -> int:
        """Rows that count: positions 0 .. n_rows - 1 are there in every layer."""
        return self._n_rows

    @property
    def n_blocks(self) -> int:
        return len(self._blocks)

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Block number of each 32 positions; replaced, never changed, when blocks are added."""
        return self._table

    def n_missing_blocks(self, n_rows: int) -> int:
        """How many blocks ``reserve(n_rows)`` would take from the pool."""
        return max(0, -(-n_rows // KV_BLOCK) - len(self._blocks))

    def reserve(self, n_rows: int) -> None:
        """Hold blocks for ``n_rows`` positions. Raises OutOfKvMemory and changes nothing when they are not there."""
        self._check_alive()
        missing = self.n_missing_blocks(n_rows)
        if missing:
            self._blocks.extend(self._pool.allocate(missing))
            self._table = np.array(self._blocks, dtype=np.int32)

    def commit(self, n_rows: int) -> None:
        """Rows up to ``n_rows`` count from now on. They must have been written in every layer."""
        self._check_alive()
        if not self._n_rows <= n_rows <= len(self._blocks) * KV_BLOCK:
            raise ValueError(
                f"cannot commit {n_rows} rows: {self._n_rows} count and {len(self._blocks)} blocks are held"
            )
        self._n_rows = n_rows

    def read_rows(self, layer: int, start: int, stop: int, k_out: _F32, v_out: _F32) -> None:
        """Copy rows [start, stop) of a layer into float32 [stop - start, kv_dim] arrays, heads side by side.

        K rows are as attention uses them: after rope, pairs (i, i + head_dim / 2).
        """
        if not 0 <= start <= stop <= self._n_rows:
            raise ValueError(f"rows {start} to {stop} were asked for and {self._n_rows} are there")
        self._check_rows(k_out, stop - start)
        self._check_rows(v_out, stop - start)
        for first, block, slots in self._pieces(start, stop):
            k_tiles, v_tiles = self._tiles(layer, block)
            rows = slice(first - start, first - start + (slots.stop - slots.start))
            self._by_head(k_out)[rows] = k_tiles[:, :, slots].transpose(2, 0, 1)
            self._by_head(v_out)[rows] = v_tiles[:, slots].transpose(1, 0, 2)

    def write_rows(self, layer: int, start: int, k: _F32, v: _F32) -> None:
        """Stage rows from position ``start`` on (float32 [n, kv_dim]); they count after ``commit``.

        Raises OutOfKvMemory when the pool has no blocks for them, ValueError for rows that already count.
        """
        self._check_alive()
        if start < self._n_rows:
            raise ValueError(f"row {start} already counts ({self._n_rows} rows do); rows that count never change")
        stop = start + len(k)
        self._check_rows(k, stop - start)
        self._check_rows(v, stop - start)
        self.reserve(stop)
        for first, block, slots in self._pieces(start, stop):
            k_tiles, v_tiles = self._tiles(layer, block)
            rows = slice(first - start, first - start + (slots.stop - slots.start))
            k_tiles[:, :, slots] = self._by_head(k)[rows].transpose(1, 2, 0)
            v_tiles[:, slots] = self._by_head(v)[rows].transpose(1, 0, 2)

    def fork(self, n_rows: int) -> KvSequence:
        """A new sequence with this one's first ``n_rows`` rows; full blocks are shared, both can grow on.

        Raises OutOfKvMemory when there is no block for the partial last one.
        """
        self._check_alive()
        if not 0 <= n_rows <= self._n_rows:
            raise ValueError(f"cannot fork at {n_rows} rows: {self._n_rows} count")
        n_full, n_partial = divmod(n_rows, KV_BLOCK)
        copied = self._pool.allocate(1) if n_partial else []
        if copied:
            self._pool.tiles[copied[0]] = self._pool.tiles[self._blocks[n_full]]
        shared = self._blocks[:n_full]
        self._pool.share(shared)
        return KvSequence(self._pool, shared + copied, n_rows)

    def adopt(self, source: KvSequence, n_rows: int) -> None:
        """Count ``n_rows`` rows of ``source`` (whole blocks, the same tokens) as one's own: the blocks are shared.

        The blocks held here for those positions go back to the pool, those beyond stay. Raises ValueError for rows
        that are not there, or fewer than count already.
        """
        self._check_alive()
        n_full, n_partial = divmod(n_rows, KV_BLOCK)
        if n_partial or not self._n_rows <= n_rows <= source.n_rows:
            raise ValueError(f"cannot adopt {n_rows} rows: {self._n_rows} count here and {source.n_rows} there")
        shared, own = source._blocks[:n_full], self._blocks[:n_full]
        self._pool.share(shared)
        self._pool.release(own)
        self._blocks[:n_full] = shared
        self._table = np.array(self._blocks, dtype=np.int32)
        self._n_rows = n_rows

    def release(self) -> None:
        """Give the blocks back; the sequence is of no use afterwards. Releasing twice does nothing."""
        if not self._released:
            self._released = True
            self._pool.release(self._blocks)
            self._blocks, self._n_rows = [], 0
            self._table = np.empty(0, np.int32)

    def _check_alive(self) -> None:
        if self._released:
            raise ValueError("the sequence has been released")

    def _check_rows(self, rows: _F32, n_rows: int) -> None:
        expected = (n_rows, self._pool.geometry.kv_dim)
        if rows.shape != expected or rows.dtype != np.float32 or not rows.flags.c_contiguous:
            raise ValueError(f"rows must be contiguous float32 {expected}, got {rows.dtype} {rows.shape}")

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, slice]]:
        """Cut [start, stop) at block borders: (first position, block number, slots in the block)."""
        pieces = []
        while start < stop:
            end = min(stop, start // KV_BLOCK * KV_BLOCK + KV_BLOCK)
            slot = start % KV_BLOCK
            pieces.append((start, self._blocks[start // KV_BLOCK], slice(slot, slot + end - start)))
            start = end
        return pieces

    def _tiles(self, layer: int, block: int) -> tuple[_F32, _F32]:
        """Views of a block's K tiles [n_kv_heads, head_dim, 32] and V tiles [n_kv_heads, 32, head_dim]."""
        g = self._pool.geometry
        k, v = self._pool.tiles[block, layer]
        return k.reshape(g.n_kv_heads, g.head_dim, KV_BLOCK), v.reshape(g.n_kv_heads, KV_BLOCK, g.head_dim)

    def _by_head(self, rows: _F32) -> _F32:
        g = self._pool.geometry
        return rows.reshape(-1, g.n_kv_heads, g.head_dim)
