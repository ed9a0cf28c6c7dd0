"""Linear layers over packed weights: the tiles of linear_ir.py laid over rows and weight groups.

Each kind of weights has compiled functions of its own, which other jitted code calls by their addresses: a tile is
compiled once, not again into every function that needs it, and a kind that no model uses costs nothing. What jitted
code knows of a kind is the address of its *kernels*, three int64, as ``kernels_of`` gives it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from kvferry.engine.kernels.compile_cache import ALWAYS, MORE_KINDS
from kvferry.engine.kernels.instruction_sets import SINGLE_STREAMS
from kvferry.engine.kernels.intrinsics import (
    ISA,
    call_linear,
    call_unpack_row,
    linear_tile,
    load_byte,
    load_float,
    load_half,
    load_int,
    store_float,
)
from kvferry.engine.kernels.jit import callback, glue, kernel
from kvferry.engine.kernels.layout import (
    CACHE_LINE,
    FLOAT_BYTES,
    QUANT_BLOCK,
    WEIGHT_FORMATS,
    WEIGHTS_Q4,
    WEIGHTS_Q8,
    weight_block_bytes,
)

GROUP_ROWS: Final = ISA.group_rows
# Work is handed out in units of 32 output rows: whole quantisation blocks of the next layer's input.
UNIT_ROWS: Final = QUANT_BLOCK
UNIT_GROUPS: Final = UNIT_ROWS // GROUP_ROWS

_SHAPES: Final = ISA.linear
_SIDE: Final = _SHAPES.side  # weight groups side by side in a tile; divides UNIT_GROUPS
_BEST: Final = _SHAPES.best
_WIDEST: Final = _SHAPES.widest
_SIDE_BYTES: Final = GROUP_ROWS * FLOAT_BYTES  # from one group's outputs to the next's
_STREAMS: Final = SINGLE_STREAMS
_AHEAD: Final = 40 * CACHE_LINE  # how far ahead each of a single row's streams is asked for

_INT: Final = types.int64
ALWAYS_KINDS: Final = (WEIGHTS_Q4, WEIGHTS_Q8)
# Where each of these lies in the kernels of a kind.
_LINEAR: Final = 0
_UNPACK_ROW: Final = 8
_BLOCK_BYTES: Final = 16


@kernel
def linear(
    kernels: int,
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
    function = load_int(kernels + _LINEAR)
    call_linear(function, weights, n_blocks, first_unit, n_units, x, x_stride, n_rows, y, y_stride, accumulate)


@kernel
def unpack_row(kernels: int, weights: int, n_blocks: int, row: int, y: int) -> None:
    """The weights of one row as float32 at ``y``: an embedding look-up."""
    call_unpack_row(load_int(kernels + _UNPACK_ROW), weights, n_blocks, row, y)


@kernel
def group_bytes(kernels: int, n_blocks: int) -> int:
    """Bytes of one weight group: ``GROUP_ROWS`` rows of ``n_blocks`` blocks."""
    return n_blocks * load_int(kernels + _BLOCK_BYTES)


@cache
def _compiled(kind: int) -> tuple[NDArray[np.int64], Any, Any]:
    """The kernels of a kind, and the functions whose addresses they are. Compiled, or loaded, when first asked for."""
    functions = _make_linear(kind), _make_unpack_row(kind)
    addresses = [function.address for function in functions]
    return np.array([*addresses, weight_block_bytes(kind, GROUP_ROWS)], np.int64), *functions


def kernels_of(kind: int) -> int:
    """What jitted code takes for a kind of packed weights; valid as long as the process lives."""
    return int(_compiled(int(kind))[0].ctypes.data)


def with_kernels(record: NDArray[Any]) -> NDArray[Any]:
    """A copy of model or layer records in which every field ``*_kind`` holds, in place of a kind, its kernels."""
    bound = record.copy()
    for field in record.dtype.names or ():
        if field.endswith("_kind"):
            bound[field] = [kernels_of(kind) for kind in record[field]]
    return bound


def _part_of(kind: int) -> str:
    """Q4 and q8 are what any model's floats become, and what the self-test computes with."""
    return ALWAYS if kind in ALWAYS_KINDS else MORE_KINDS


@glue
def _tile_of(
    kind: int, n: int, w: int, stride: int, n_blocks: int, x: int, x_stride: int, y: int, y_stride: int, add: int,
    ahead: int, n_ahead: int,
) -> None:  # fmt: skip
    """The tile of ``n`` tokens; the widest that a processor has is 8."""
    if n == 1:
        linear_tile(kind, 1, _SIDE, w, stride, n_blocks, x, x_stride, y, y_stride, _SIDE_BYTES, add, ahead, n_ahead)
    elif n == 2:
        linear_tile(kind, 2, _SIDE, w, stride, n_blocks, x, x_stride, y, y_stride, _SIDE_BYTES, add, ahead, n_ahead)
    elif n == 3:
        linear_tile(kind, 3, _SIDE, w, stride, n_blocks, x, x_stride, y, y_stride, _SIDE_BYTES, add, ahead, n_ahead)
    elif n == 4:
        linear_tile(kind, 4, _SIDE, w, stride, n_blocks, x, x_stride, y, y_stride, _SIDE_BYTES, add, ahead, n_ahead)
    elif n == 5 and _WIDEST >= 5:
        linear_tile(kind, 5, _SIDE, w, stride, n_blocks, x, x_stride, y, y_stride, _SIDE_BYTES, add, ahead, n_ahead)
    elif n == 6 and _WIDEST >= 6:
        linear_tile(kind, 6, _SIDE, w, stride, n_blocks, x, x_stride, y, y_stride, _SIDE_BYTES, add, ahead, n_ahead)
    elif n == 7 and _WIDEST >= 7:
        linear_tile(kind, 7, _SIDE, w, stride, n_blocks, x, x_stride, y, y_stride, _SIDE_BYTES, add, ahead, n_ahead)
    elif n == 8 and _WIDEST >= 8:
        linear_tile(kind, 8, _SIDE, w, stride, n_blocks, x, x_stride, y, y_stride, _SIDE_BYTES, add, ahead, n_ahead)


def _make_linear(kind: int) -> Any:
    block_bytes = weight_block_bytes(kind, GROUP_ROWS)
    block_lines = -(-block_bytes // CACHE_LINE)

    @callback(types.void(*[_INT] * 10), _part_of(kind))
    def linear_of_kind(
        weights: int,
        n_blocks: int,
        first_unit: int,
        n_units: int,
        x: int,
        x_stride: int,
        n_rows: int,
        y: int,
        y_stride: int,
        add: int,
    ) -> None:
        """A single row's weights are read once, from memory, so four far streams are followed at a time, each for long:
        the hardware prefetcher needs a run-up on every stream, and a group is only a few kilobytes.

        More rows go through in pieces of about equal size, all with the same few weight groups, which stay in the first
        cache. Meanwhile the groups that follow are asked for, each piece asking for its share, so that memory is busy
        all the time.
        """
        stride = n_blocks * block_bytes
        w = weights + first_unit * UNIT_GROUPS * stride
        n_groups = n_units * UNIT_GROUPS
        n_far = n_groups // (_STREAMS * _SIDE) * _SIDE if n_rows == 1 else 0
        far_stride, far_side = n_far * stride, n_far * _SIDE_BYTES
        for group in range(n_far):
            w_group, y_group = w + group * stride, y + group * _SIDE_BYTES
            linear_tile(
                kind, 1, _STREAMS, w_group, far_stride, n_blocks, x, 0, y_group, 0, far_side, add, _AHEAD, block_lines
            )
        n_pieces = 1 if n_rows <= _WIDEST else (n_rows + _BEST - 1) // _BEST
        for group in range(n_far * _STREAMS, n_groups, _SIDE):
            w_group, y_group = w + group * stride, y + group * _SIDE_BYTES
            row, line = 0, 0
            for piece in range(1, n_pieces + 1):
                next_row, next_line = n_rows * piece // n_pieces, block_lines * piece // n_pieces
                _tile_of(
                    kind, next_row - row, w_group, stride, n_blocks,
                    x + row * x_stride, x_stride, y_group + row * y_stride, y_stride, add,
                    _SIDE * stride + line * CACHE_LINE, next_line - line,
                )  # fmt: skip
                row, line = next_row, next_line

    return linear_of_kind


def _make_unpack_row(kind: int) -> Any:
    form = WEIGHT_FORMATS[kind]
    block_bytes = weight_block_bytes(kind, GROUP_ROWS)
    nibbles, is_signed, has_minimum, n_scales = form.nibbles, form.is_signed, form.has_minimum, form.n_scales
    scale_bytes, scales_at = form.scale_bytes, form.integer_bytes * GROUP_ROWS

    @callback(types.void(*[_INT] * 4), _part_of(kind))
    def unpack_row_of_kind(weights: int, n_blocks: int, row: int, y: int) -> None:
        """d * integer, or d * integer + m."""
        lane = row % GROUP_ROWS
        block_at = weights + row // GROUP_ROWS * n_blocks * block_bytes
        for block in range(n_blocks):
            for k in range(QUANT_BLOCK):
                k_group = k // 4 % 4 if nibbles else k // 4
                integer = load_byte(block_at + (k_group * GROUP_ROWS + lane) * 4 + k % 4)
                if nibbles:
                    integer = integer & 15 if k < QUANT_BLOCK // 2 else integer >> 4
                if is_signed and integer > 127:
                    integer -= 256
                scale = k * n_scales // QUANT_BLOCK
                value = _scale(scale_bytes, block_at + scales_at, scale, lane) * np.float32(integer)
                if has_minimum:
                    value = value + _scale(scale_bytes, block_at + scales_at, n_scales, lane)
                store_float(y + (block * QUANT_BLOCK + k) * FLOAT_BYTES, value)
            block_at += block_bytes

    return unpack_row_of_kind


@glue
def _scale(scale_bytes: int, scales_at: int, index: int, lane: int) -> np.float32:
    """The number of row ``lane`` in the ``index``-th row of numbers behind a block's integers."""
    at = scales_at + (index * GROUP_ROWS + lane) * scale_bytes
    return load_float(at) if scale_bytes == FLOAT_BYTES else load_half(at)
