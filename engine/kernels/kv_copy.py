"""Rows between their stored form, a position after the other, and the cache's tiles (layout.py).

Elements are moved, never computed with, so they come as unsigned integers of their size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kernels.intrinsics import transpose
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import FLOAT_BYTES, KV_BLOCK
from kvferry.engine.kernels.transpose_ir import SQUARE


@kernel
def _k_to_tile(k: NDArray[Any], row: int, first: int, n: int, tile: NDArray[Any], slot: int, head_dim: int) -> None:
    """n rows of one head of K, its elements from ``first`` on, to positions ``slot`` on of a tile."""
    if k.itemsize == FLOAT_BYTES and (slot | n | head_dim) % SQUARE == 0:
        row_bytes, tile_row_bytes = k.shape[1] * FLOAT_BYTES, KV_BLOCK * FLOAT_BYTES
        for i in range(0, n, SQUARE):
            source = k.ctypes.data + (row + i) * row_bytes + first * FLOAT_BYTES
            target = tile.ctypes.data + (slot + i) * FLOAT_BYTES
            for d in range(0, head_dim, SQUARE):
                transpose(source + d * FLOAT_BYTES, row_bytes, target + d * tile_row_bytes, tile_row_bytes)
        return
    for d in range(head_dim):
        for i in range(n):
            tile[d * KV_BLOCK + slot + i] = k[row + i, first + d]


@kernel
def rows_to_tiles(
    tiles: NDArray[Any],
    layer: int,
    table: NDArray[np.int32],
    start: int,
    k: NDArray[Any],
    v: NDArray[Any],
    scales: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    head_dim: int,
) -> None:
    """Rows k, v [n, n_heads * head_dim] to positions ``start`` on of a layer.

    ``tiles`` [blocks, layers, 2, n_heads, tile]; ``table``: the block of each 32 positions. ``scales`` of K and of V:
    bytes [n, n_heads * 4], not looked at unless a tile has room behind its values.
    """
    n_values = head_dim * KV_BLOCK
    n_heads, has_scales = tiles.shape[3], tiles.shape[4] > n_values
    at, stop = start, start + len(k)
    while at < stop:
        block, slot = table[at // KV_BLOCK], at % KV_BLOCK
        n, row = min(KV_BLOCK - slot, stop - at), at - start
        for head in range(n_heads):
            k_tile, v_tile = tiles[block, layer, 0, head], tiles[block, layer, 1, head]
            first = head * head_dim
            _k_to_tile(k, row, first, n, k_tile, slot, head_dim)
            for i in range(n):
                for d in range(head_dim):
                    v_tile[(slot + i) * head_dim + d] = v[row + i, first + d]
            if has_scales:
                for i in range(n):
                    for byte in range(FLOAT_BYTES):
                        target, source = n_values + (slot + i) * FLOAT_BYTES + byte, head * FLOAT_BYTES + byte
                        k_tile[target] = scales[0][row + i, source]
                        v_tile[target] = scales[1][row + i, source]
        at += n


@kernel
def tiles_to_rows(
    tiles: NDArray[Any],
    layer: int,
    table: NDArray[np.int32],
    start: int,
    k: NDArray[Any],
    v: NDArray[Any],
    scales: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    head_dim: int,
) -> None:
    """The way back; arguments as ``rows_to_tiles`` takes them."""
    n_values = head_dim * KV_BLOCK
    n_heads, has_scales = tiles.shape[3], tiles.shape[4] > n_values
    at, stop = start, start + len(k)
    while at < stop:
        block, slot = table[at // KV_BLOCK], at % KV_BLOCK
        n, row = min(KV_BLOCK - slot, stop - at), at - start
        for head in range(n_heads):
            k_tile, v_tile = tiles[block, layer, 0, head], tiles[block, layer, 1, head]
            first = head * head_dim
            for i in range(n):
                for d in range(head_dim):
                    k[row + i, first + d] = k_tile[d * KV_BLOCK + slot + i]
            for i in range(n):
                for d in range(head_dim):
                    v[row + i, first + d] = v_tile[(slot + i) * head_dim + d]
            if has_scales:
                for i in range(n):
                    for byte in range(FLOAT_BYTES):
                        source, target = n_values + (slot + i) * FLOAT_BYTES + byte, head * FLOAT_BYTES + byte
                        scales[0][row + i, target] = k_tile[source]
                        scales[1][row + i, target] = v_tile[source]
        at += n
