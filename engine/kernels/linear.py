"""Linear layers over packed weights: the tiles of linear_ir.py laid over rows and weight groups."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvferry.engine.kernels.intrinsics import ISA, load_byte, load_half, make_linear_tile, store_float
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import (
    CACHE_LINE,
    FLOAT_BYTES,
    QUANT_BLOCK,
    WEIGHTS_Q4,
    WEIGHTS_Q8,
    weight_block_bytes,
)

GROUP_ROWS: Final = ISA.group_rows
# Work is handed out in units of 32 output rows: whole quantisation blocks of the next layer's input.
UNIT_ROWS: Final = QUANT_BLOCK
UNIT_GROUPS: Final = UNIT_ROWS // GROUP_ROWS

_Q4_BLOCK: Final = weight_block_bytes(WEIGHTS_Q4, GROUP_ROWS)
_Q8_BLOCK: Final = weight_block_bytes(WEIGHTS_Q8, GROUP_ROWS)
_MANY: Final = ISA.linear_tokens
_SIDE: Final = ISA.linear_groups  # weight groups side by side in a tile; divides UNIT_GROUPS
_FAR: Final = 4  # weight streams of a single row's product
_AHEAD: Final = 10 * CACHE_LINE  # and how far ahead each is asked for

_q4_many: Final = make_linear_tile(WEIGHTS_Q4, _MANY, _SIDE)
_q4_two: Final = make_linear_tile(WEIGHTS_Q4, 2, _SIDE)
_q4_one: Final = make_linear_tile(WEIGHTS_Q4, 1, _SIDE)
_q4_far: Final = make_linear_tile(WEIGHTS_Q4, 1, _FAR, _AHEAD)
_q8_many: Final = make_linear_tile(WEIGHTS_Q8, _MANY, _SIDE)
_q8_two: Final = make_linear_tile(WEIGHTS_Q8, 2, _SIDE)
_q8_one: Final = make_linear_tile(WEIGHTS_Q8, 1, _SIDE)
_q8_far: Final = make_linear_tile(WEIGHTS_Q8, 1, _FAR, _AHEAD)


@kernel
def group_bytes(kind: int, n_blocks: int) -> int:
    """Bytes of one weight group: ``GROUP_ROWS`` rows of ``n_blocks`` blocks."""
    return n_blocks * (_Q4_BLOCK if kind == WEIGHTS_Q4 else _Q8_BLOCK)


@kernel
def _near_tile(
    kind: int, n_rows: int, w: int, n_blocks: int, x: int, x_stride: int, y: int, y_stride: int, accumulate: int
) -> int:
    """One tile of neighbouring weight groups; returns how many of the ``n_rows`` rows it did."""
    stride = group_bytes(kind, n_blocks)
    side = GROUP_ROWS * FLOAT_BYTES
    if kind == WEIGHTS_Q4:
        if n_rows >= _MANY:
            _q4_many(w, stride, n_blocks, x, x_stride, y, y_stride, side, accumulate)
            return _MANY
        if n_rows >= 2:
            _q4_two(w, stride, n_blocks, x, x_stride, y, y_stride, side, accumulate)
            return 2
        _q4_one(w, stride, n_blocks, x, x_stride, y, y_stride, side, accumulate)
        return 1
    if n_rows >= _MANY:
        _q8_many(w, stride, n_blocks, x, x_stride, y, y_stride, side, accumulate)
        return _MANY
    if n_rows >= 2:
        _q8_two(w, stride, n_blocks, x, x_stride, y, y_stride, side, accumulate)
        return 2
    _q8_one(w, stride, n_blocks, x, x_stride, y, y_stride, side, accumulate)
    return 1


@kernel
def _many_rows(
    kind: int, w: int, n_blocks: int, n_groups: int, x: int, x_stride: int, n_rows: int, y: int, y_stride: int, add: int
) -> None:
    """Weights outside, rows inside: a weight group is a few kilobytes and stays in the first cache."""
    for group in range(0, n_groups, _SIDE):
        w_group = w + group * group_bytes(kind, n_blocks)
        y_group = y + group * GROUP_ROWS * FLOAT_BYTES
        row = 0
        while row < n_rows:
            row += _near_tile(
                kind,
                n_rows - row,
                w_group,
                n_blocks,
                x + row * x_stride,
                x_stride,
                y_group + row * y_stride,
                y_stride,
                add,
            )


@kernel
def _one_row(kind: int, w: int, n_blocks: int, n_groups: int, x: int, y: int, accumulate: int) -> None:
    """A single row. Its weights are read once, from memory, so four far streams are followed at a time, each for long:
    the hardware prefetcher needs a run-up on every stream, and a group is only a few kilobytes."""
    stride = group_bytes(kind, n_blocks)
    side = GROUP_ROWS * FLOAT_BYTES
    far = n_groups // (_FAR * _SIDE) * _SIDE
    for group in range(far):
        if kind == WEIGHTS_Q4:
            _q4_far(w + group * stride, far * stride, n_blocks, x, 0, y + group * side, 0, far * side, accumulate)
        else:
            _q8_far(w + group * stride, far * stride, n_blocks, x, 0, y + group * side, 0, far * side, accumulate)
    for group in range(far * _FAR, n_groups, _SIDE):
        _near_tile(kind, np.int64(1), w + group * stride, n_blocks, x, stride, y + group * side, stride, accumulate)


@kernel
def linear(
    kind: int,
    weights: int,
    n_blocks: int,
    first_unit: int,
    n_units: int,
    x: int,
    x_stride: int,
    n_rows: int,
    y: int,
    y_stride: int,
    accumulate: int,
) -> None:
    """Output rows [first_unit, first_unit + n_units) * 32 of a linear layer, for ``n_rows`` activation rows.

    ``x``: activation rows, ``x_stride`` bytes apart. ``y``: where the first of those outputs goes, float32, rows
    ``y_stride`` bytes apart. ``accumulate``: 1 adds to what is there.
    """
    w = weights + first_unit * UNIT_GROUPS * group_bytes(kind, n_blocks)
    if n_rows == 1:
        _one_row(kind, w, n_blocks, n_units * UNIT_GROUPS, x, y, accumulate)
    else:
        _many_rows(kind, w, n_blocks, n_units * UNIT_GROUPS, x, x_stride, n_rows, y, y_stride, accumulate)


@kernel
def unpack_row(kind: int, weights: int, n_blocks: int, row: int, y: int) -> None:
    """The weights of one row as float32 at ``y``: d * byte, or d * nibble + m. An embedding look-up."""
    lane = row % GROUP_ROWS
    block_at = weights + row // GROUP_ROWS * group_bytes(kind, n_blocks)
    for block in range(n_blocks):
        for k in range(QUANT_BLOCK):
            target = y + (block * QUANT_BLOCK + k) * FLOAT_BYTES
            in_group = 4 * lane + k % 4
            if kind == WEIGHTS_Q8:
                byte = load_byte(block_at + k // 4 * 4 * GROUP_ROWS + in_group)
                if byte > 127:
                    byte -= 256
                d = load_half(block_at + QUANT_BLOCK * GROUP_ROWS + 2 * lane)
                store_float(target, d * np.float32(byte))
            else:
                byte = load_byte(block_at + k % 16 // 4 * 4 * GROUP_ROWS + in_group)
                nibble = byte & 15 if k < 16 else byte >> 4
                scales = block_at + QUANT_BLOCK // 2 * GROUP_ROWS
                d = load_half(scales + 2 * lane)
                m = load_half(scales + 2 * GROUP_ROWS + 2 * lane)
                store_float(target, d * np.float32(nibble) + m)
        block_at += _Q8_BLOCK if kind == WEIGHTS_Q8 else _Q4_BLOCK
