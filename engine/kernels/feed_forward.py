"""The gated part that dense layers and experts share: silu(gate) * up, quantised for down."""

from __future__ import annotations

import numpy as np

from kvferry.engine.kernels.attention import activation_stride
from kvferry.engine.kernels.intrinsics import gated_quantise
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import FLOAT_BYTES
from kvferry.engine.kernels.linear import UNIT_ROWS, linear


@kernel
def gate_and_up(
    gate_kind: int,
    gate_at: int,
    up_kind: int,
    up_at: int,
    n_blocks: int,
    first: int,
    n: int,
    x: int,
    x_stride: int,
    n_rows: int,
    aside: int,
) -> None:
    """Units [first, first + n), 32 outputs of gate and up each, for ``n_rows`` activation rows at ``x``.

    ``aside``: room for 2 * n_rows * n * 32 floats, which ``store_gated`` takes.
    """
    row_bytes = n * UNIT_ROWS * FLOAT_BYTES
    for which in range(2):
        kind, weights, target = gate_kind, gate_at, aside
        if which == 1:
            kind, weights, target = up_kind, up_at, aside + n_rows * row_bytes
        linear(kind, weights, n_blocks, first, n, x, x_stride, n_rows, target, row_bytes, np.int64(0))


@kernel
def store_gated(aside: int, first: int, n: int, n_units: int, n_rows: int, gated: int) -> None:
    """What ``gate_and_up`` left aside, into units [first, first + n) of activation rows of n_units * 32 elements."""
    row_bytes = n * UNIT_ROWS * FLOAT_BYTES
    up = aside + n_rows * row_bytes
    for row in range(n_rows):
        target = gated + row * activation_stride(n_units * UNIT_ROWS)
        for unit in range(n):
            offset = row * row_bytes + unit * UNIT_ROWS * FLOAT_BYTES
            gated_quantise(aside + offset, up + offset, target, n_units, first + unit)
