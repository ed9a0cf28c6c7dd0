"""The vision tower's kernels, called from Python with addresses, each on a share of the work (vision/tower.py)."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvferry.engine.kernels.attention import TILE_ROWS, activation_stride, all_scores, all_values, softmax_step
from kvferry.engine.kernels.attention_ir import LOWEST_SCORE, RESCALE_LANES
from kvferry.engine.kernels.intrinsics import (
    add_floats,
    gelu_erf,
    gelu_tanh,
    layer_norm,
    load_float,
    quantise_floats,
    store_float,
)
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import FLOAT_BYTES, KV_BLOCK, QUANT_BLOCK
from kvferry.engine.kernels.linear import UNIT_ROWS, linear

_SCORE_BYTES: Final = KV_BLOCK * FLOAT_BYTES
_LOWEST: Final = np.float32(LOWEST_SCORE)
# Floats of scratch memory that attend_head needs beside one output row for each tile row.
TILE_FLOATS: Final = TILE_ROWS * (2 * KV_BLOCK) + 2 * (TILE_ROWS + RESCALE_LANES)


@kernel
def quantise_rows(x: int, n_rows: int, n_blocks: int, out: int) -> None:
    """Float rows at ``x`` into activation rows at ``out``."""
    stride = activation_stride(n_blocks * QUANT_BLOCK)
    for row in range(n_rows):
        quantise_floats(x + row * n_blocks * QUANT_BLOCK * FLOAT_BYTES, n_blocks, out + row * stride)


@kernel
def layer_norm_rows(x: int, n_rows: int, n_blocks: int, weight: int, bias: int, epsilon: np.float32, out: int) -> None:
    row_bytes = n_blocks * QUANT_BLOCK * FLOAT_BYTES
    for row in range(n_rows):
        layer_norm(x + row * row_bytes, weight, bias, n_blocks, epsilon, out + row * row_bytes)


@kernel
def gelu_rows(x: int, n_rows: int, n_blocks: int, by_erf: int) -> None:
    """GELU in place: by the error function (1) or by tanh (0)."""
    if by_erf == 1:
        gelu_erf(x, n_rows * n_blocks)
    else:
        gelu_tanh(x, n_rows * n_blocks)


@kernel
def linear_units(
    kernels: int, weights: int, n_blocks: int, first: int, n: int, x: int, x_stride: int, n_rows: int, y: int,
    y_stride: int, bias: int, accumulate: int,
) -> None:  # fmt: skip
    """Units [first, first + n) of 32 outputs of a linear layer and its bias, into (or added to) float rows at ``y``.

    The bias is added after the finished sum; where ``accumulate`` is 1 both are added to what is there, the sum first.
    """
    target = y + first * UNIT_ROWS * FLOAT_BYTES
    linear(kernels, weights, n_blocks, first, n, x, x_stride, n_rows, target, y_stride, accumulate)
    for row in range(n_rows):
        add_floats(target + row * y_stride, bias + first * UNIT_ROWS * FLOAT_BYTES, n)


@kernel
def attend_head(q: int, k_tiles: int, v_tiles: int, n: int, head_dim: int, out: int, scratch: int) -> None:
    """One head of one image: every patch sees all ``n`` patches.

    ``q`` and ``out`` float32 [n, head_dim], ``k_tiles`` [blocks, head_dim, 32], ``v_tiles`` [blocks, 32, head_dim]; the
    head is filled up with zeros to whole blocks of 32. ``scratch``: TILE_FLOATS floats.
    """
    row_bytes = head_dim * FLOAT_BYTES
    tile_bytes = KV_BLOCK * row_bytes
    scores = scratch
    sums = scores + TILE_ROWS * _SCORE_BYTES
    maxima = sums + TILE_ROWS * _SCORE_BYTES
    rescales = maxima + (TILE_ROWS + RESCALE_LANES) * FLOAT_BYTES
    for first in range(0, n, TILE_ROWS):
        n_rows = min(TILE_ROWS, n - first)
        output = out + first * row_bytes
        for i in range(n_rows * head_dim):
            store_float(output + i * FLOAT_BYTES, np.float32(0.0))
        for i in range(n_rows * KV_BLOCK):
            store_float(sums + i * FLOAT_BYTES, np.float32(0.0))
        for row in range(n_rows):
            store_float(maxima + row * FLOAT_BYTES, _LOWEST)
        for block in range((n + KV_BLOCK - 1) // KV_BLOCK):
            n_valid = min(np.int64(KV_BLOCK), n - block * KV_BLOCK)
            k_tile, v_tile = k_tiles + block * tile_bytes, v_tiles + block * tile_bytes
            step = np.int64(KV_BLOCK * FLOAT_BYTES)
            all_scores(q + first * row_bytes, n_rows, head_dim, k_tile, scores, k_tile + tile_bytes, step)
            softmax_step(n_rows, n_rows, n_valid, scores, maxima, rescales, sums)
            all_values(scores, n_rows, n_valid, v_tile, head_dim, rescales, output, v_tile + tile_bytes, step)
        for row in range(n_rows):
            inverse = np.float32(1.0) / _folded(sums + row * _SCORE_BYTES)
            for d in range(head_dim):
                at = output + row * row_bytes + d * FLOAT_BYTES
                store_float(at, load_float(at) * inverse)


@kernel
def _folded(sums: int) -> np.float32:
    """Sum of 32 floats, in halves; they are used up."""
    n = KV_BLOCK // 2
    while n > 0:
        for i in range(n):
            at = sums + i * FLOAT_BYTES
            store_float(at, load_float(at) + load_float(at + n * FLOAT_BYTES))
        n //= 2
    return load_float(sums)
