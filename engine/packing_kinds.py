"""What each kind of stored weights can be packed as without a change of its values, and what packs it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import ModelInvalid
from kvferry.engine.kernels import packing_stored as kernels
from kvferry.engine.kernels.layout import WEIGHTS_Q4, WEIGHTS_Q4_WIDE, WEIGHTS_Q5, WEIGHTS_Q6, WEIGHTS_Q8

_U8 = NDArray[np.uint8]


# The kind of packed weights that each becomes.
STORED_KINDS: Final = {
    "q4_0": WEIGHTS_Q4,
    "q4_1": WEIGHTS_Q4,
    "q8_0": WEIGHTS_Q8,
    "q5_0": WEIGHTS_Q8,
    "q5_1": WEIGHTS_Q5,
    "q4_k": WEIGHTS_Q4_WIDE,
    "q5_k": WEIGHTS_Q5,
    "q6_k": WEIGHTS_Q6,
}
# How weights and activations are held; part of the fingerprint, since it decides what rows are computed. A file must
# keep its recipe from one version to the next, or nobody finds the snapshots of it.
_RECIPE: Final = "weights as stored, q4_0/q4_1/q8_0; activations int8 in blocks of 32, scale absmax/127"
_MORE_KINDS: Final = frozenset({"q5_0", "q5_1", "q4_k", "q5_k", "q6_k"})
_MORE_RECIPE: Final = "; also as stored, q5_0/q5_1/q4_k/q5_k/q6_k"


def recipe_of(kinds: AbstractSet[str], quant: str | None) -> str:
    """The recipe of a file with tensors of these kinds. ``quant``: what others become, None where there are none."""
    more = _MORE_RECIPE if kinds & _MORE_KINDS else ""
    return _RECIPE + more + ("" if quant is None else f"; other weights to {quant}, recipe 1")


def pack_stored(kind: str, stored: _U8, packed: _U8) -> None:
    """Fill ``packed`` [n_groups, n_blocks, block bytes] with rows [n, row bytes] as a file stores them.

    What is beyond those rows is left as it is. Raises ModelInvalid for what a block cannot hold.
    """
    source = np.ascontiguousarray(stored)
    where = source.ctypes.data, len(source), packed.ctypes.data, packed.shape[1]
    if kind == "q4_0":
        minima = _minima_of_q4_0(source)
        kernels.pack_q4_0(*where, minima.ctypes.data)
    elif kind == "q4_1":
        kernels.pack_q4_1(*where)
    elif kind == "q8_0":
        kernels.pack_q8_0(*where)
    else:
        from kvferry.engine.kernels.packing_more import PACKERS  # compiled when it is imported, if it was not before

        PACKERS[kind](*where)


def _minima_of_q4_0(blocks: _U8) -> NDArray[np.float16]:
    """-8 * d of every block [rows, n_blocks]: d * (q - 8) is d * q + m with that m, exactly."""
    d = np.ascontiguousarray(blocks.reshape(len(blocks), -1, 18)[:, :, :2]).view(np.float16)
    minima = d.astype(np.float32) * np.float32(-8.0)
    with np.errstate(over="ignore"):
        halves = minima.astype(np.float16)
    if not np.all(np.isfinite(halves)):
        raise ModelInvalid("it has q4_0 scales above 8188, more than the kernels can hold")
    return halves
