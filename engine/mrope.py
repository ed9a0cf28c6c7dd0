"""Rope angles of tokens that stand at a time, a row and a column (interleaved M-RoPE)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def mrope_rows(
    table: NDArray[np.float32], positions: NDArray[np.int32], section: tuple[int, int, int]
) -> NDArray[np.float32]:
    """float32 [n, 2, head_dim / 2] for ``positions`` [3, n]: each frequency's cosine and sine from its axis's row.

    ``table``: ``rope_table``. Frequency i turns by the row if i % 3 is 1 and i < 3 * section[1], by the column if i % 3
    is 2 and i < 3 * section[2], else by time. Copies entries of the table: a token with three equal positions gets
    exactly the table's row.
    """
    rows: NDArray[np.float32] = table[positions[0]]
    for axis in (1, 2):
        own = slice(axis, 3 * section[axis], 3)
        rows[:, :, own] = table[positions[axis]][:, :, own]
    return rows
