"""Packing of float weight rows into the kernels' layout (layout.py), quantised."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import QUANT_BLOCK
from kvferry.engine.kernels.linear import GROUP_ROWS

_NIBBLE_BYTES: Final = 16


@kernel
def block_extremes(x: Any, lowest: Any, highest: Any) -> None:
    """Smallest and largest element of each block: float32 [rows, n_blocks] of ``x`` [rows, n_blocks * 32].

    Both are no number where any element is none.
    """
    for r in range(x.shape[0]):
        for block in range(lowest.shape[1]):
            low = high = x[r, block * QUANT_BLOCK]
            for k in range(block * QUANT_BLOCK, (block + 1) * QUANT_BLOCK):
                value = x[r, k]
                low = min(low, value)
                high = max(high, value)
                if value != value:  # noqa: PLR0124  # only a NaN is
                    low = high = value
                    break
            lowest[r, block], highest[r, block] = low, high


@kernel
def pack_floats_q8(x: Any, d: Any, d_bits: Any, packed: Any) -> None:
    """Floats to q8 groups: q = round_half_even(x / d), kept in -127..127, 0 where d is 0.

    ``x`` float32 [rows, n_blocks * 32]; ``d`` float32 and ``d_bits`` uint16 [rows, n_blocks]: the scales, and the same
    as float16 bits. ``packed``: uint8 [n_groups, n_blocks, bytes of a packed block].
    """
    scales = 32 * GROUP_ROWS
    for r in range(x.shape[0]):
        group, lane = r // GROUP_ROWS, r % GROUP_ROWS
        for block in range(d.shape[1]):
            target = packed[group, block]
            target[scales + 2 * lane] = d_bits[r, block] & 255
            target[scales + 2 * lane + 1] = d_bits[r, block] >> 8
            divisor = d[r, block]
            for k in range(QUANT_BLOCK):
                q = np.float32(0.0)
                if divisor != 0.0:
                    q = np.rint(x[r, block * QUANT_BLOCK + k] / divisor)
                    q = min(max(q, np.float32(-127.0)), np.float32(127.0))
                target[(k // 4 * GROUP_ROWS + lane) * 4 + k % 4] = np.int64(q) & 255


@kernel
def pack_floats_q4(x: Any, d: Any, m: Any, d_bits: Any, m_bits: Any, packed: Any) -> None:
    """Floats to q4 groups: q = round_half_even((x - m) / d), kept in 0..15, 0 where d is 0. Else as pack_floats_q8."""
    scales = _NIBBLE_BYTES * GROUP_ROWS
    for r in range(x.shape[0]):
        group, lane = r // GROUP_ROWS, r % GROUP_ROWS
        for block in range(d.shape[1]):
            target = packed[group, block]
            target[scales + 2 * lane] = d_bits[r, block] & 255
            target[scales + 2 * lane + 1] = d_bits[r, block] >> 8
            target[scales + 2 * GROUP_ROWS + 2 * lane] = m_bits[r, block] & 255
            target[scales + 2 * GROUP_ROWS + 2 * lane + 1] = m_bits[r, block] >> 8
            divisor, minimum = d[r, block], m[r, block]
            for k in range(QUANT_BLOCK):
                q = np.float32(0.0)
                if divisor != 0.0:
                    q = np.rint((x[r, block * QUANT_BLOCK + k] - minimum) / divisor)
                    q = min(max(q, np.float32(0.0)), np.float32(15.0))
                at = (k % 16 // 4 * GROUP_ROWS + lane) * 4 + k % 4
                if k < 16:
                    target[at] = np.int64(q)
                else:
                    target[at] |= np.int64(q) << 4
