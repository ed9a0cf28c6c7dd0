"""Packing of weight rows as GGUF files store them into the kernels' layout (layout.py), without a change of any value.

Every kernel takes ``source``, the address of ``n_rows`` rows of whole GGUF blocks; ``packed``, the address of the
groups that the first of them starts; and ``n_blocks`` of 32 in a row. Lanes of rows that a group does not have stay as
they are. Four elements in a row lie in four bytes on both sides, so bytes are moved and computed with by fours.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvferry.engine.kernels.intrinsics import (
    load_int16,
    load_word,
    store_int16,
    store_int32,
)
from kvferry.engine.kernels.jit import glue, kernel
from kvferry.engine.kernels.layout import (
    WEIGHTS_Q4,
    WEIGHTS_Q8,
    weight_block_bytes,
)
from kvferry.engine.kernels.linear import GROUP_ROWS

VECTOR: Final = 4 * GROUP_ROWS
NIBBLE_SCALES: Final = 4 * VECTOR  # where the numbers behind the integers begin, from the block's start
BYTE_SCALES: Final = 8 * VECTOR
_HALVES: Final = 2 * GROUP_ROWS  # from one row of numbers to the next

_Q4_BYTES: Final = weight_block_bytes(WEIGHTS_Q4, GROUP_ROWS)
Q8_BYTES: Final = weight_block_bytes(WEIGHTS_Q8, GROUP_ROWS)


@glue
def block_at(packed: int, row: int, n_blocks: int, block: int, block_bytes: int) -> int:
    return packed + (row // GROUP_ROWS * n_blocks + block) * block_bytes


@kernel
def _copy_words(source: int, n: int, target: int) -> None:
    """4 * n bytes to the same lane of n vectors."""
    for j in range(n):
        store_int32(target + j * VECTOR, load_word(source + 4 * j))


@glue
def copy_half(source: int, target: int) -> None:
    store_int16(target, load_int16(source))


@kernel
def pack_q4_1(source: int, n_rows: int, packed: int, n_blocks: int) -> None:
    """To q4: d, m, 16 bytes (low nibble = k, high nibble = k + 16)."""
    for row in range(n_rows):
        lane = row % GROUP_ROWS
        for block in range(n_blocks):
            at, target = source + (row * n_blocks + block) * 20, block_at(packed, row, n_blocks, block, _Q4_BYTES)
            _copy_words(at + 4, np.int64(4), target + 4 * lane)
            for i in range(2):
                copy_half(at + 2 * i, target + NIBBLE_SCALES + _HALVES * i + 2 * lane)


@kernel
def pack_q4_0(source: int, n_rows: int, packed: int, n_blocks: int, minima: int) -> None:
    """To q4: d, 16 bytes as in q4_1, element = d * (nibble - 8). ``minima``: float16 [rows, blocks], -8 * d."""
    for row in range(n_rows):
        lane = row % GROUP_ROWS
        for block in range(n_blocks):
            index, target = row * n_blocks + block, block_at(packed, row, n_blocks, block, _Q4_BYTES)
            _copy_words(source + index * 18 + 2, np.int64(4), target + 4 * lane)
            copy_half(source + index * 18, target + NIBBLE_SCALES + 2 * lane)
            copy_half(minima + index * 2, target + NIBBLE_SCALES + _HALVES + 2 * lane)


@kernel
def pack_q8_0(source: int, n_rows: int, packed: int, n_blocks: int) -> None:
    """To q8: d, 32 int8."""
    for row in range(n_rows):
        lane = row % GROUP_ROWS
        for block in range(n_blocks):
            at, target = source + (row * n_blocks + block) * 34, block_at(packed, row, n_blocks, block, Q8_BYTES)
            _copy_words(at + 2, np.int64(8), target + 4 * lane)
            copy_half(at, target + BYTE_SCALES + 2 * lane)
