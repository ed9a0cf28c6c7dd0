"""Float weights into the engine's own blocks of 32 (docs/numerics.md, "Weights").

Plain IEEE operations in float32, element by element, so the same weights give the same bytes on every machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import ModelInvalid
from kvferry.engine.kernels.layout import QUANT_BLOCK, WEIGHTS_Q4
from kvferry.engine.kernels.packing import block_extremes, pack_floats_q4, pack_floats_q8

_F32 = NDArray[np.float32]

_Q8_MAX: Final = np.float32(127)
_Q4_MAX: Final = np.float32(15)


def pack_floats(rows: _F32, packed: NDArray[np.uint8], kind: int) -> None:
    """Fill ``packed`` [n_groups, n_blocks, block bytes] with float32 rows [n, n_blocks * 32].

    q8: d = float16(max |x| / 127). q4: m = float16(min x), d = float16((max x - min x) / 15). Raises ModelInvalid for
    what a float16 scale cannot hold.
    """
    lowest = np.empty((len(rows), rows.shape[1] // QUANT_BLOCK), np.float32)
    highest = np.empty_like(lowest)
    block_extremes(rows, lowest, highest)
    if kind == WEIGHTS_Q4:
        d, m = _half((highest - lowest) / _Q4_MAX), _half(lowest)
        pack_floats_q4(rows, d.astype(np.float32), m.astype(np.float32), d.view(np.uint16), m.view(np.uint16), packed)
    else:
        d = _half(np.maximum(highest, -lowest) / _Q8_MAX)
        pack_floats_q8(rows, d.astype(np.float32), d.view(np.uint16), packed)


def _half(values: NDArray[np.floating]) -> NDArray[np.float16]:
    with np.errstate(over="ignore", invalid="ignore"):  # said below
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ModelInvalid("weights are infinite, not numbers, or too large for a block's float16 scale")
    return halves
