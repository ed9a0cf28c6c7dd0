"""The KV cache: one pool of blocks, and sequences that hold blocks of it.

A block is 32 positions of all layers. Blocks are reference-counted: a fork shares the full blocks of its prefix. A row
that counts is never written again, so shared blocks need no copy on write; only the partial last block is copied.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import OutOfKvMemory
from kvferry.engine.kernels.kv_copy import rows_to_tiles, tiles_to_rows
from kvferry.engine.kernels.layout import KV_BLOCK, KV_F16, KV_F32, KV_Q8, kv_tile_bytes
from kvferry.engine.memory import huge_empty

_F32 = NDArray[np.float32]

# Rows as they are stored: K, V; and for q8 the scales of K and of V. One array each, a position per row.
Planes = tuple[NDArray[Any], ...]


class KvKind(StrEnum):
    """What the cache stores; docs/numerics.md, "KV kinds".

    f32: rows as computed. f16: rounded to float16. q8: int8 with one float32 scale for each head of a row.
    """

    F32 = "f32"
    F16 = "f16"
    Q8 = "q8"

    @property
    def code(self) -> int:
        """As the jitted code knows it."""
        return {KvKind.F32: KV_F32, KvKind.F16: KV_F16, KvKind.Q8: KV_Q8}[self]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return np.dtype({KvKind.F32: np.float32, KvKind.F16: np.float16, KvKind.Q8: np.int8}[self])


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The shape of cached rows. A row of K (or V) in one layer has n_kv_heads * head_dim elements."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_size: int = KV_BLOCK
    kind: KvKind = KvKind.F32

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers for ``block_size`` positions."""
        return self.n_layers * 2 * self.n_kv_heads * kv_tile_bytes(self.kind.code, self.head_dim)

    def empty_planes(self, n_rows: int) -> Planes:
        """Arrays for ``n_rows`` rows of a layer as they are stored."""
        values = (n_rows, self.kv_dim)
        planes: Planes = (np.empty(values, self.kind.dtype), np.empty(values, self.kind.dtype))
        if self.kind is KvKind.Q8:
            scales = (n_rows, self.n_kv_heads)
            planes += (np.empty(scales, np.float32), np.empty(scales, np.float32))
        return planes


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
        body: NDArray[Any] = huge_empty(self.n_blocks * self.block_bytes)
        if geometry.kind is not KvKind.Q8:  # whose tiles hold integers and floats, so they stay bytes
            body = body.view(geometry.kind.dtype)
        # K tile: [head_dim, 32]; V tile: [32, head_dim] (kernels/layout.py)
        self.tiles: Final[NDArray[Any]] = body.reshape(self.n_blocks, geometry.n_layers, 2, geometry.n_kv_heads, -1)
        self.bits: Final[NDArray[Any]] = self.bits_of(self.tiles)
        self.address: Final = int(self.tiles.ctypes.data)

    @property
    def n_free_blocks(self) -> int:
        return len(self._free)

    @staticmethod
    def bits_of(values: NDArray[Any]) -> NDArray[Any]:
        """Cached values as jitted code moves them: unsigned integers, whatever they stand for."""
        return values.view(f"u{values.dtype.itemsize}")

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

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence holds the block."""
        return bool(self._references[block] > 1)

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

        K rows are as attention uses them: after rope, pairs (i, i + head_dim / 2), and widened from what is stored.
        """
        shape = (stop - start, self._pool.geometry.kv_dim)
        for out in (k_out, v_out):
            _check_plane(out, shape, np.dtype(np.float32))
        if self._pool.geometry.kind is KvKind.F32:
            self.read_planes(layer, start, stop, (k_out, v_out))
            return
        planes = self._pool.geometry.empty_planes(max(0, stop - start))
        self.read_planes(layer, start, stop, planes)
        for out, values, scales in zip((k_out, v_out), planes[:2], planes[2:] or (None, None), strict=True):
            out[:] = values
            if scales is not None:
                self._by_head(out)[:] *= scales[:, :, None]

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """Copy rows [start, stop) of a layer out as they are stored, to the bit (``KvGeometry.empty_planes``)."""
        if not 0 <= start <= stop <= self._n_rows:
            raise ValueError(f"rows {start} to {stop} were asked for and {self._n_rows} are there")
        self._check_planes(planes, stop - start)
        self._copy(tiles_to_rows, layer, start, planes)

    def write_rows(self, layer: int, start: int, k: _F32, v: _F32) -> None:
        """Stage float32 rows from position ``start`` on: ``write_planes`` for an f32 cache, the only kind it is for."""
        if self._pool.geometry.kind is not KvKind.F32:
            raise ValueError(f"rows of a {self._pool.geometry.kind} cache are written as they are stored, as planes")
        self.write_planes(layer, start, (k, v))

    def write_planes(self, layer: int, start: int, planes: Planes) -> None:
        """Stage rows from position ``start`` on, as ``read_planes`` gave them; they count after ``commit``.

        Raises OutOfKvMemory when the pool has no blocks for them, ValueError for rows that already count.
        """
        self._check_alive()
        if start < self._n_rows:
            raise ValueError(f"row {start} already counts ({self._n_rows} rows do); rows that count never change")
        n_rows = len(planes[0])
        self._check_planes(planes, n_rows)
        self.reserve(start + n_rows)
        self._copy(rows_to_tiles, layer, start, planes)

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

    def truncate(self, n_rows: int) -> None:
        """Only the first ``n_rows`` rows count from now on; blocks behind them go back to the pool.

        A block that others share is never written to: where the last one is, its rows are copied into one of its own
        (raises OutOfKvMemory when there is none, and changes nothing).
        """
        self._check_alive()
        if not 0 <= n_rows <= self._n_rows:
            raise ValueError(f"cannot truncate to {n_rows} rows: {self._n_rows} count")
        n_kept, last = -(-n_rows // KV_BLOCK), n_rows // KV_BLOCK
        dropped = self._blocks[n_kept:]
        if n_rows % KV_BLOCK and self._pool.is_shared(self._blocks[last]):
            (copied,) = self._pool.allocate(1)
            self._pool.tiles[copied] = self._pool.tiles[self._blocks[last]]
            dropped.append(self._blocks[last])
            self._blocks[last] = copied
        del self._blocks[n_kept:]
        self._pool.release(dropped)
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

    def _check_planes(self, planes: Planes, n_rows: int) -> None:
        g = self._pool.geometry
        shapes = [((n_rows, g.kv_dim), g.kind.dtype)] * 2
        if g.kind is KvKind.Q8:
            shapes += [((n_rows, g.n_kv_heads), np.dtype(np.float32))] * 2
        if len(planes) != len(shapes):
            raise ValueError(f"rows of a {g.kind} cache are {len(shapes)} arrays, got {len(planes)}")
        for plane, (shape, dtype) in zip(planes, shapes, strict=True):
            _check_plane(plane, shape, dtype)

    def _copy(self, kernel: Any, layer: int, start: int, planes: Planes) -> None:
        """Between planes and tiles, the GIL free meanwhile."""
        if not 0 <= layer < self._pool.geometry.n_layers:
            raise ValueError(f"there is no layer {layer} in {self._pool.geometry.n_layers}")
        k, v = (self._pool.bits_of(plane) for plane in planes[:2])
        scales = tuple(plane.view(np.uint8) for plane in planes[2:]) or (k.view(np.uint8), v.view(np.uint8))
        head_dim = self._pool.geometry.head_dim
        kernel(self._pool.bits, layer, self._table, start, k, v, scales, head_dim)

    def _by_head(self, rows: _F32) -> _F32:
        g = self._pool.geometry
        return rows.reshape(-1, g.n_kv_heads, g.head_dim)


def _check_plane(plane: NDArray[Any], shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    if plane.shape != shape or plane.dtype != dtype or not plane.flags.c_contiguous:
        raise ValueError(f"rows must be contiguous {dtype} {shape}, got {plane.dtype} {plane.shape}")
