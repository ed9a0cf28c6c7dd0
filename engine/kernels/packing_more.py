"""Packing of q5 and K-quant rows as GGUF files store them; see packing_stored.py. Imported by those who need them."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from kvferry.engine.kernels.compile_cache import MORE_KINDS
from kvferry.engine.kernels.intrinsics import load_byte, load_half, load_word, store_float, store_int32
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import WEIGHTS_Q4_WIDE, WEIGHTS_Q5, WEIGHTS_Q6, weight_block_bytes
from kvferry.engine.kernels.linear import GROUP_ROWS
from kvferry.engine.kernels.packing_stored import BYTE_SCALES, NIBBLE_SCALES, Q8_BYTES, VECTOR, block_at, copy_half

more_kernel: Final = partial(kernel, part=MORE_KINDS)

_FLOATS: Final = 4 * GROUP_ROWS  # from one row of numbers to the next
_LOW: Final = 0x0F0F0F0F
_ONES: Final = 0x01010101
_SUPER: Final = 8  # blocks of 32 in a super-block

_Q4_WIDE_BYTES: Final = weight_block_bytes(WEIGHTS_Q4_WIDE, GROUP_ROWS)
_Q5_BYTES: Final = weight_block_bytes(WEIGHTS_Q5, GROUP_ROWS)
_Q6_BYTES: Final = weight_block_bytes(WEIGHTS_Q6, GROUP_ROWS)


@more_kernel
def _five_bits(nibbles: int, fifths: int, k_group: int) -> int:
    """Four elements 0..31 of a q5_0 or q5_1 block: a byte holds elements k and k + 16, bit k of 32 tops element k."""
    word = load_word(nibbles + 4 * (k_group % 4))
    if k_group >= 4:
        word = word >> 4
    bits = (load_word(fifths) >> (4 * k_group)) & 15
    return (word & _LOW) | ((bits * 0x00204081) & _ONES) << 4  # the product moves bit i to byte i


@more_kernel
def pack_q5_0(source: int, n_rows: int, packed: int, n_blocks: int) -> None:
    """To q8: d, 4 bytes of fifth bits, 16 bytes of nibbles; element = d * (integer - 16)."""
    for row in range(n_rows):
        lane = row % GROUP_ROWS
        for block in range(n_blocks):
            at, target = source + (row * n_blocks + block) * 22, block_at(packed, row, n_blocks, block, Q8_BYTES)
            for k_group in range(8):
                flipped = _five_bits(at + 6, at + 2, k_group) ^ (_ONES << 4)  # the sign bit of five
                signs = flipped & (_ONES << 4)
                store_int32(target + k_group * VECTOR + 4 * lane, flipped | signs << 1 | signs << 2 | signs << 3)
            copy_half(at, target + BYTE_SCALES + 2 * lane)


@more_kernel
def pack_q5_1(source: int, n_rows: int, packed: int, n_blocks: int) -> None:
    """To q5: d, m, 4 bytes of fifth bits, 16 bytes of nibbles."""
    for row in range(n_rows):
        lane = row % GROUP_ROWS
        for block in range(n_blocks):
            at, target = source + (row * n_blocks + block) * 24, block_at(packed, row, n_blocks, block, _Q5_BYTES)
            for k_group in range(8):
                store_int32(target + k_group * VECTOR + 4 * lane, _five_bits(at + 8, at + 4, k_group))
            for i in range(2):
                store_float(target + BYTE_SCALES + _FLOATS * i + 4 * lane, load_half(at + 2 * i))


@more_kernel
def _store_scale_and_minimum(block: int, index: int, target: int) -> None:
    """d * scale and -(dmin * minimum) of run ``index`` of 8 in a q4_K or q5_K block, one row of numbers apart.

    12 bytes at 4 hold eight scales and eight minima of 6 bits: the first four scales, the first four minima, then the
    low halves of the others, whose top bits are those of the eight bytes before.
    """
    packed = block + 4
    if index < 4:
        scale, minimum = load_byte(packed + index) & 63, load_byte(packed + index + 4) & 63
    else:
        low = load_byte(packed + index + 4)
        scale = (low & 15) | load_byte(packed + index - 4) >> 6 << 4
        minimum = low >> 4 | load_byte(packed + index) >> 6 << 4
    store_float(target, load_half(block) * np.float32(scale))
    store_float(target + _FLOATS, -(load_half(block + 2) * np.float32(minimum)))


@more_kernel
def pack_q4_k(source: int, n_rows: int, packed: int, n_blocks: int) -> None:
    """To q4_wide: d, dmin, 12 bytes of scales, then 32 bytes for each two runs, one in low nibbles, one in high."""
    for row in range(n_rows):
        lane = row % GROUP_ROWS
        for block in range(n_blocks):
            run = block % _SUPER
            at = source + (row * n_blocks + block) // _SUPER * 144
            target = block_at(packed, row, n_blocks, block, _Q4_WIDE_BYTES)
            nibbles, shift = at + 16 + run // 2 * 32, run % 2 * 4
            for j in range(4):
                low, high = load_word(nibbles + 4 * j) >> shift, load_word(nibbles + 16 + 4 * j) >> shift
                store_int32(target + j * VECTOR + 4 * lane, (low & _LOW) | (high & _LOW) << 4)
            _store_scale_and_minimum(at, run, target + NIBBLE_SCALES + 4 * lane)


@more_kernel
def pack_q5_k(source: int, n_rows: int, packed: int, n_blocks: int) -> None:
    """To q5: as q4_K with 32 bytes more before the nibbles; bit j of byte i is the fifth bit of element i of run j."""
    for row in range(n_rows):
        lane = row % GROUP_ROWS
        for block in range(n_blocks):
            run = block % _SUPER
            at = source + (row * n_blocks + block) // _SUPER * 176
            target = block_at(packed, row, n_blocks, block, _Q5_BYTES)
            nibbles, shift = at + 48 + run // 2 * 32, run % 2 * 4
            for k_group in range(8):
                low = load_word(nibbles + 4 * k_group) >> shift
                fifth = load_word(at + 16 + 4 * k_group) >> run
                store_int32(target + k_group * VECTOR + 4 * lane, (low & _LOW) | (fifth & _ONES) << 4)
            _store_scale_and_minimum(at, run, target + BYTE_SCALES + 4 * lane)


@more_kernel
def pack_q6_k(source: int, n_rows: int, packed: int, n_blocks: int) -> None:
    """To q6: 128 bytes of low nibbles, 64 of top bits, 16 int8 scales, d; element = d * scale * (integer - 32).

    Each half of 128 elements has 64 low bytes (runs 0 and 1 in the low nibbles, 2 and 3 in the high) and 32 top ones
    (two bits for each of the four runs).
    """
    for row in range(n_rows):
        lane = row % GROUP_ROWS
        for block in range(n_blocks):
            run = block % _SUPER
            at = source + (row * n_blocks + block) // _SUPER * 210
            target = block_at(packed, row, n_blocks, block, _Q6_BYTES) + 4 * lane
            nibbles, shift = at + run // 4 * 64 + run % 2 * 32, run % 4 // 2 * 4
            tops = at + 128 + run // 4 * 32
            for k_group in range(8):
                low = load_word(nibbles + 4 * k_group) >> shift
                top = load_word(tops + 4 * k_group) >> (run % 4 * 2)
                flipped = ((low & _LOW) | (top & 0x03030303) << 4) ^ (_ONES << 5)  # the sign bit of six
                signs = flipped & (_ONES << 5)
                store_int32(target + k_group * VECTOR, flipped | signs << 1 | signs << 2)
            for i in range(2):
                scale = load_byte(at + 192 + 2 * run + i)
                if scale > 127:
                    scale -= 256
                store_float(target + BYTE_SCALES + _FLOATS * i, load_half(at + 208) * np.float32(scale))


PACKERS: Final = {
    "q5_0": pack_q5_0,
    "q5_1": pack_q5_1,
    "q4_k": pack_q4_k,
    "q5_k": pack_q5_k,
    "q6_k": pack_q6_k,
}
