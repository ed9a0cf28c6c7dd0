"""Repacking of GGUF weight rows into the kernels' layout (layout.py)."""

from __future__ import annotations

from typing import Any, Final

from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.linear import GROUP_ROWS

_NIBBLE_BYTES: Final = 16


@kernel
def pack_q4_1(source: Any, rows: Any, packed: Any) -> None:
    """GGUF q4_1 blocks (d, m, 16 bytes: low nibble = k, high nibble = k + 16) to q4 groups.

    ``source`` uint8 [rows, n_blocks * 20]; output row r of the tensor is source row ``rows[r]``; ``packed`` uint8
    [n_groups, n_blocks, bytes of a packed block], zero where rows end.
    """
    n_blocks = packed.shape[1]
    scales = _NIBBLE_BYTES * GROUP_ROWS
    for r in range(rows.shape[0]):
        group, lane = r // GROUP_ROWS, r % GROUP_ROWS
        row = source[rows[r]]
        for block in range(n_blocks):
            start = block * 20
            target = packed[group, block]
            for i in range(2):
                target[scales + 2 * lane + i] = row[start + i]
                target[scales + 2 * GROUP_ROWS + 2 * lane + i] = row[start + 2 + i]
            for j in range(4):
                for c in range(4):
                    target[(j * GROUP_ROWS + lane) * 4 + c] = row[start + 4 + 4 * j + c]


@kernel
def pack_q4_0(source: Any, minima: Any, rows: Any, packed: Any) -> None:
    """GGUF q4_0 blocks (d, 16 bytes of nibbles, element = d * (nibble - 8)) to q4 groups.

    ``source`` uint8 [rows, n_blocks * 18]; ``minima`` uint8 [rows, n_blocks * 2]: -8 * d as float16. Else as pack_q4_1.
    """
    n_blocks = packed.shape[1]
    scales = _NIBBLE_BYTES * GROUP_ROWS
    for r in range(rows.shape[0]):
        group, lane = r // GROUP_ROWS, r % GROUP_ROWS
        row = source[rows[r]]
        for block in range(n_blocks):
            start = block * 18
            target = packed[group, block]
            for i in range(2):
                target[scales + 2 * lane + i] = row[start + i]
                target[scales + 2 * GROUP_ROWS + 2 * lane + i] = minima[rows[r], 2 * block + i]
            for j in range(4):
                for c in range(4):
                    target[(j * GROUP_ROWS + lane) * 4 + c] = row[start + 2 + 4 * j + c]


@kernel
def pack_q8_0(source: Any, rows: Any, packed: Any) -> None:
    """GGUF q8_0 blocks (d, 32 int8) to q8 groups; ``source`` uint8 [rows, n_blocks * 34]. Else as pack_q4_1."""
    n_blocks = packed.shape[1]
    scales = 32 * GROUP_ROWS
    for r in range(rows.shape[0]):
        group, lane = r // GROUP_ROWS, r % GROUP_ROWS
        row = source[rows[r]]
        for block in range(n_blocks):
            start = block * 34
            target = packed[group, block]
            for i in range(2):
                target[scales + 2 * lane + i] = row[start + i]
            for j in range(8):
                for c in range(4):
                    target[(j * GROUP_ROWS + lane) * 4 + c] = row[start + 2 + 4 * j + c]
