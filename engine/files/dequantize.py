"""GGUF's block formats as float32, in plain numpy; equal to the bit to the format's own Python library.

A row is whole blocks. Blocks of 32 hold a float16 scale (and a minimum); blocks of 256 hold eight or sixteen smaller
blocks whose scales are themselves small integers under one float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_U8 = NDArray[np.uint8]
_F32 = NDArray[np.float32]


def dequantize(kind: str, data: _U8) -> _F32:
    """Rows of one tensor: uint8 [n, bytes of a row] to float32 [n, cols]. KeyError for a kind not in KINDS."""
    block_bytes, block = KINDS[kind]
    blocks = np.ascontiguousarray(data).reshape(-1, block_bytes)
    return block(blocks).reshape(data.shape[0], -1)


def _f16(blocks: _U8, start: int) -> _F32:
    """One float16 of each block, as a column."""
    column = np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)
    return column.astype(np.float32)


def _nibbles(packed: _U8) -> _U8:
    """All low halves of a block, then all high halves."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _fifth_bits(packed: _U8) -> _U8:
    """Bit i of a block's 32, moved to where it belongs above a nibble."""
    bits: _U8 = np.unpackbits(packed, axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(blocks: _U8) -> _F32:
    return _f16(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: _U8) -> _F32:
    return _f16(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _f16(blocks, 2)


def _q5_0(blocks: _U8) -> _F32:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _f16(blocks, 0) * (quants.astype(np.float32) - np.float32(16))


def _q5_1(blocks: _U8) -> _F32:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _f16(blocks, 0) * quants.astype(np.float32) + _f16(blocks, 2)


def _q8_0(blocks: _U8) -> _F32:
    return _f16(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _six_bit_scales(packed: _U8) -> tuple[_U8, _U8]:
    """Eight scales and eight minima of 6 bits each out of 12 bytes: uint8 [n, 8] twice.

    Bytes 0..3 hold the first four scales, 4..7 the first four minima, in their low 6 bits; bytes 8..11 the low halves
    of the last four of each, whose top 2 bits are in the top bits of the bytes before.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (low & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (low >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _scaled_k(blocks: _U8, quants: _U8) -> _F32:
    """q4_K and q5_K: value = (d * scale) * quant - dmin * minimum for each 32 of 256."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    d = (_f16(blocks, 0) * scales.astype(np.float32))[:, :, None]
    m = (_f16(blocks, 2) * minima.astype(np.float32))[:, :, None]
    return d * quants.reshape(-1, 8, 32).astype(np.float32) - m


def _paired_nibbles(packed: _U8) -> _U8:
    """32 bytes hold two runs of 32: all low halves, then all high halves. uint8 [n, 8, 32]."""
    runs = packed.reshape(len(packed), 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: _U8) -> _F32:
    return _scaled_k(blocks, _paired_nibbles(blocks[:, 16:]))


def _q5_k(blocks: _U8) -> _F32:
    """Bit j of byte i of the 32 high bytes is the fifth bit of element i of run j."""
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high: _U8 = (blocks[:, 16:48].reshape(-1, 1, 32) >> shifts) & np.uint8(1)
    return _scaled_k(blocks, _paired_nibbles(blocks[:, 48:]) | (high << np.uint8(4)))


def _q6_k(blocks: _U8) -> _F32:
    """Two halves of 128; each 64 low bytes (4 bits of an element) and 32 high ones (2 bits of four elements)."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).astype(np.float32) - np.float32(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return (_f16(blocks, 208) * scales)[:, :, None] * quants.reshape(-1, 16, 16)


def _f32(blocks: _U8) -> _F32:
    return blocks.view(np.float32)


def _half(blocks: _U8) -> _F32:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: _U8) -> _F32:
    """The upper half of a float32."""
    return (blocks.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


# kind -> bytes of a block, and what makes float32 of [n_blocks, bytes]
KINDS: Final[dict[str, tuple[int, Callable[[_U8], NDArray[Any]]]]] = {
    "f32": (4, _f32),
    "f16": (2, _half),
    "bf16": (2, _bf16),
    "q4_0": (18, _q4_0),
    "q4_1": (20, _q4_1),
    "q5_0": (22, _q5_0),
    "q5_1": (24, _q5_1),
    "q8_0": (34, _q8_0),
    "q4_k": (144, _q4_k),
    "q5_k": (176, _q5_k),
    "q6_k": (210, _q6_k),
}
