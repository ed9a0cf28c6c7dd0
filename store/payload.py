"""What rows look like inside a version 3 block, by kind and layout. Pure; the document is docs/vlkv-v3.md.

A kind has *planes*: arrays of one row per position, stored one after the other in a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.store.geometry import KvGeometry, Rows, RowSink, RowSource
from kvferry.store.q8 import Q8Sink, Q8Source

Planes = tuple[NDArray[Any], ...]

Q4_GROUP: Final = 32  # values that share a scale


class Kind(IntEnum):
    """The header's fmt."""

    F32 = 0
    F16 = 1
    Q8 = 2
    Q4 = 3  # lossy

    @property
    def is_exact(self) -> bool:
        """Whether a cache of this kind gets its own bits back."""
        return self is not Kind.Q4


class Layout(IntEnum):
    """How full blocks are laid out."""

    ROWS = 0
    TILES = 1


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a block: its little-endian dtype, and values in a row."""

    dtype: str
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * self.width


class PlaneSource(Protocol):
    """Gives rows in planes; they do not change while they are written."""

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """Copies rows start..stop-1 of a layer out, each plane [stop - start, width]."""


class PlaneSink(Protocol):
    """Takes restored rows in planes."""

    def write_planes(self, layer: int, start: int, planes: Planes) -> None:
        """Takes rows start..start+n-1 of a layer; the arrays are reused after the call, so copy."""


class TileMemory(Protocol):
    """A sink or source whose own memory holds tiles, so that the disk may write into it and read from it.

    A sink with tiles takes rows, too, and is called from two threads at once, for different rows, after the first call
    has come back.
    """

    def tile_buffers(self, layer: int, first_block: int, n_blocks: int) -> list[memoryview] | None:
        """The blocks' memory, each contiguous, laid out as ``tile_views`` reads it. None: use rows instead."""


class InPlaceReader(Protocol):
    """A TileMemory that reads files on its own, faster than Python does.

    Both methods say whether all is there and good. When not, they do not say why: read the same in another way.
    """

    def read_tiles_in_place(
        self, fd: int, offset: int, layer: int, first_block: int, n_blocks: int, digests: memoryview
    ) -> bool:
        """Tiles from a descriptor's ``offset`` on, which are to have these xxh3-128 digests, 16 bytes each."""

    def read_rows_in_place(self, fd: int, offset: int, layer: int, start: int, n_rows: int, block_size: int) -> bool:
        """Whole blocks of float32 rows as version 1 holds them, to positions ``start`` on."""


def as_tiles(memory: Any) -> TileMemory | None:
    """The caller's own memory, when it offers it."""
    return memory if hasattr(memory, "tile_buffers") else None


def as_in_place_reader(memory: Any) -> InPlaceReader | None:
    """The same for reading on its own."""
    return memory if hasattr(memory, "read_tiles_in_place") else None


@lru_cache(maxsize=64)
def planes_of(kind: Kind, geometry: KvGeometry) -> tuple[Plane, ...]:
    """The planes of a kind, in file order."""
    d, heads = geometry.kv_dim, geometry.n_kv_heads
    if kind is Kind.F32:
        return Plane("<f4", d), Plane("<f4", d)
    if kind is Kind.F16:
        return Plane("<f2", d), Plane("<f2", d)
    if kind is Kind.Q8:
        return Plane("i1", d), Plane("i1", d), Plane("<f4", heads), Plane("<f4", heads)
    return Plane("u1", d // 2), Plane("u1", d // 2), Plane("<f4", d // Q4_GROUP), Plane("<f4", d // Q4_GROUP)


def fits(kind: Kind, layout: Layout, geometry: KvGeometry) -> bool:
    """Whether the format has such blocks."""
    if layout is Layout.TILES and kind is Kind.Q4:
        return False
    return kind is not Kind.Q4 or geometry.kv_dim % Q4_GROUP == 0


@lru_cache(maxsize=64)
def row_bytes(kind: Kind, geometry: KvGeometry) -> int:
    """Bytes of one position in one layer."""
    return sum(plane.row_bytes for plane in planes_of(kind, geometry))


def empty_planes(kind: Kind, geometry: KvGeometry, n_rows: int) -> Planes:
    """Arrays for n_rows of a layer."""
    return tuple(np.empty((n_rows, plane.width), plane.dtype) for plane in planes_of(kind, geometry))


def views(kind: Kind, geometry: KvGeometry, block: memoryview, n_rows: int) -> Planes:
    """The planes inside a block stored as rows; no copy."""
    arrays = []
    offset = 0
    for plane in planes_of(kind, geometry):
        n_bytes = plane.row_bytes * n_rows
        arrays.append(np.frombuffer(block[offset : offset + n_bytes], plane.dtype).reshape(n_rows, plane.width))
        offset += n_bytes
    return tuple(arrays)


def tile_views(kind: Kind, geometry: KvGeometry, block: memoryview) -> Planes:
    """The rows inside a tile, [kv_bs, nkv, hd], for q8 then the scales [kv_bs, nkv]: strided views, no copy."""
    n, heads, hd = geometry.block_size, geometry.n_kv_heads, geometry.head_dim
    dtype = np.dtype(planes_of(kind, geometry)[0].dtype)
    tiles = np.frombuffer(block, np.uint8).reshape(2, heads, -1)
    n_values = hd * n * dtype.itemsize
    k, v = tiles[..., :n_values].view(dtype)
    values = k.reshape(heads, hd, n).transpose(2, 0, 1), v.reshape(heads, n, hd).transpose(1, 0, 2)
    if kind is not Kind.Q8:
        return values
    k_scales, v_scales = tiles[..., n_values:].view("<f4")
    return *values, k_scales.T, v_scales.T


class F32Rows:
    """A RowSource or RowSink seen as planes."""

    def __init__(self, source: RowSource | None = None, sink: RowSink | None = None) -> None:
        self._source = source
        self._sink = sink

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        assert self._source is not None  # noqa: S101 -- made for reading
        self._source.read_rows(layer, start, stop, planes[0], planes[1])

    def write_planes(self, layer: int, start: int, planes: Planes) -> None:
        assert self._sink is not None  # noqa: S101 -- made for writing
        self._sink.write_rows(layer, start, planes[0], planes[1])


class Q8Planes:
    """A Q8Source or Q8Sink seen as planes."""

    def __init__(self, source: Q8Source | None = None, sink: Q8Sink | None = None) -> None:
        self._source = source
        self._sink = sink

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        assert self._source is not None  # noqa: S101 -- made for reading
        self._source.read_q8(layer, start, stop, *planes)

    def write_planes(self, layer: int, start: int, planes: Planes) -> None:
        assert self._sink is not None  # noqa: S101 -- made for writing
        self._sink.write_q8(layer, start, *planes)


def as_source(kind: Kind, rows: Any) -> PlaneSource:
    """What a caller gives, as planes."""
    if hasattr(rows, "read_planes"):
        source: PlaneSource = rows
        return source
    return Q8Planes(source=rows) if kind is Kind.Q8 else F32Rows(source=rows)


def as_sink(kind: Kind, sink: Any) -> PlaneSink:
    """What a caller takes, as planes."""
    if hasattr(sink, "write_planes"):
        taker: PlaneSink = sink
        return taker
    return Q8Planes(sink=sink) if kind is Kind.Q8 else F32Rows(sink=sink)


class MemoryPlanes:
    """Rows of any kind in memory: per plane an array [layers, n, width]. A source and a sink. Not thread-safe."""

    def __init__(self, arrays: Planes) -> None:
        self.arrays = arrays

    @classmethod
    def empty(cls, kind: Kind, geometry: KvGeometry, n_rows: int) -> MemoryPlanes:
        """Room for n_rows, not yet filled."""
        return cls(tuple(np.empty((geometry.n_layers, n_rows, p.width), p.dtype) for p in planes_of(kind, geometry)))

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """Copies rows out."""
        for array, plane in zip(self.arrays, planes, strict=True):
            plane[:] = array[layer, start:stop]

    def write_planes(self, layer: int, start: int, planes: Planes) -> None:
        """Takes rows."""
        for array, plane in zip(self.arrays, planes, strict=True):
            array[layer, start : start + len(plane)] = plane


def to_q4(rows: Rows) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """float32 [n, kv_dim] as q4: values uint8 [n, kv_dim / 2], scales float32 [n, kv_dim / 32]. Loses bits."""
    groups = rows.reshape(len(rows), -1, Q4_GROUP)
    scales = (np.abs(groups).max(axis=-1) / np.float32(7)).astype(np.float32)
    steps = np.where(scales == 0, np.float32(1), scales)
    nibbles = (np.rint(groups / steps[..., None]).astype(np.int8) + 8).astype(np.uint8).reshape(len(rows), -1)
    packed: NDArray[np.uint8] = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))
    return packed, scales


def from_q4(values: NDArray[np.uint8], scales: NDArray[np.float32]) -> Rows:
    """The rows that q4 stands for, float32 [n, kv_dim]."""
    n = len(values)
    nibbles = np.empty((n, values.shape[1] * 2), np.int8)
    nibbles[:, 0::2], nibbles[:, 1::2] = values & 15, values >> 4
    groups = (nibbles - np.int8(8)).reshape(n, -1, Q4_GROUP).astype(np.float32)
    return (groups * scales[..., None]).reshape(n, -1)
