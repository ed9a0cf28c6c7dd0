"""Float weights into the engine's own blocks of 32, as GGUF writes them (docs/numerics.md, "Weights").

Plain IEEE operations in float32, element by element, so the same weights give the same bytes on every machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import ModelInvalid
from kvferry.engine.kernels.layout import QUANT_BLOCK

_F32 = NDArray[np.float32]
_U8 = NDArray[np.uint8]

_Q8_MAX: Final = np.float32(127)
_Q4_MAX: Final = np.float32(15)


def quantise_q8(rows: _F32) -> _U8:
    """float32 [n, cols] to q8_0 blocks, uint8 [n, cols / 32 * 34]. ModelInvalid for what a float16 scale cannot hold.

    d = float16(max |x| / 127); q = round_half_even(x / d), within -127..127; 0 where d is 0.
    """
    blocks = _blocks(rows)
    d = _half(np.abs(blocks).max(axis=2) / _Q8_MAX)
    q = np.clip(np.rint(_divided(blocks, d)), -_Q8_MAX, _Q8_MAX).astype(np.int8)
    return np.concatenate([_bytes(d), q.view(np.uint8)], axis=2).reshape(len(rows), -1)


def quantise_q4(rows: _F32) -> _U8:
    """float32 [n, cols] to q4_1 blocks, uint8 [n, cols / 32 * 20]. ModelInvalid as above.

    m = float16(min x); d = float16((max x - min x) / 15); q = round_half_even((x - m) / d), within 0..15; 0 where d
    is 0.
    """
    blocks = _blocks(rows)
    lowest = blocks.min(axis=2)
    d, m = _half((blocks.max(axis=2) - lowest) / _Q4_MAX), _half(lowest)
    q = np.rint(_divided(blocks - m.astype(np.float32)[:, :, None], d))
    nibbles = np.clip(q, np.float32(0), _Q4_MAX).astype(np.uint8)
    packed = nibbles[:, :, :16] | (nibbles[:, :, 16:] << np.uint8(4))
    return np.concatenate([_bytes(d), _bytes(m), packed], axis=2).reshape(len(rows), -1)


def _blocks(rows: _F32) -> _F32:
    return rows.reshape(len(rows), -1, QUANT_BLOCK)


def _half(values: _F32) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):  # said below
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ModelInvalid("weights are infinite, not numbers, or too large for a block's float16 scale")
    return halves


def _divided(blocks: _F32, d: NDArray[np.float16]) -> _F32:
    divisor = d.astype(np.float32)[:, :, None]
    return np.divide(blocks, divisor, out=np.zeros_like(blocks), where=divisor != 0)


def _bytes(halves: NDArray[np.float16]) -> _U8:
    return np.ascontiguousarray(halves)[:, :, None].view(np.uint8)
