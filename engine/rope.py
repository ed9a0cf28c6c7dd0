"""Rope angles by the engine's own arithmetic: the same table, to the bit, on every machine (docs/numerics.md, "rope").

Only +, -, *, / and rounding to a whole number of float64 are used, which IEEE 754 fixes completely; no libm.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext
from math import factorial
from typing import Final

import numpy as np
from numpy.typing import NDArray

_F64 = NDArray[np.float64]

# pi / 2 in three parts of 33, 33 and 53 bits: n * part is exact in float64 for n < 2^20, far beyond any context.
_HALF_PI: Final = Decimal("1.57079632679489661923132169163975144209858469968755291")
_PART_BITS: Final = 32
_HALF_PI_HIGH: Final = int(_HALF_PI * 2**_PART_BITS) / 2**_PART_BITS
_HALF_PI_MIDDLE: Final = int((_HALF_PI - Decimal(_HALF_PI_HIGH)) * 2 ** (2 * _PART_BITS)) / 2 ** (2 * _PART_BITS)
_HALF_PI_LOW: Final = float(_HALF_PI - Decimal(_HALF_PI_HIGH) - Decimal(_HALF_PI_MIDDLE))
_TWO_OVER_PI: Final = float(1 / _HALF_PI)

# Taylor series; on |r| <= pi/4 the first term left out is below 1e-17.
_SIN_TERMS: Final = tuple((-1) ** k / factorial(2 * k + 1) for k in range(9))
_COS_TERMS: Final = tuple((-1) ** k / factorial(2 * k) for k in range(9))

# The float64 numbers on the way take twenty times the table's own memory.
_POSITIONS_AT_A_TIME: Final = 4096


def inverse_frequencies(head_dim: int, theta: float, divisors: Sequence[float] | None = None) -> NDArray[np.float32]:
    """theta^(-2i / head_dim) / divisors[i] for i < head_dim / 2, in 40-digit decimals and rounded to float32 once."""
    with localcontext() as context:
        context.prec = 40
        log_theta = Decimal(theta).ln()
        values = [(-log_theta * 2 * i / head_dim).exp() for i in range(head_dim // 2)]
        if divisors is not None:
            values = [value / Decimal(divisor) for value, divisor in zip(values, divisors, strict=True)]
        return np.array([np.float32(float(value)) for value in values], dtype=np.float32)


def rope_table(
    n_positions: int,
    head_dim: int,
    theta: float,
    divisors: Sequence[float] | None = None,
    magnitude: float = 1.0,
) -> NDArray[np.float32]:
    """float32 [n_positions, 2, head_dim / 2]: cosines, then sines, of the angles of each position, times ``magnitude``.

    angle = float32(position) * inverse frequency, rounded to float32; cosine and sine in float64, multiplied in
    float64, rounded once more.
    """
    table = np.empty((n_positions, 2, head_dim // 2), np.float32)
    frequencies = inverse_frequencies(head_dim, theta, divisors)
    for start in range(0, n_positions, _POSITIONS_AT_A_TIME):
        positions = np.arange(start, min(start + _POSITIONS_AT_A_TIME, n_positions), dtype=np.float32)
        angles = positions[:, None] * frequencies[None, :]
        table[start : start + len(positions)] = np.stack(_cos_sin(angles.astype(np.float64)), axis=1) * magnitude
    return table


def _cos_sin(angles: _F64) -> tuple[_F64, _F64]:
    """Cosine and sine of angles in [0, 2^20 * pi / 2)."""
    quarter_turns = np.rint(angles * _TWO_OVER_PI)
    r = ((angles - quarter_turns * _HALF_PI_HIGH) - quarter_turns * _HALF_PI_MIDDLE) - quarter_turns * _HALF_PI_LOW
    cos, sin = _polynomial(_COS_TERMS, r * r), _polynomial(_SIN_TERMS, r * r) * r
    quadrant = quarter_turns.astype(np.int64) & 3
    swapped = (quadrant & 1) == 1
    new_cos, new_sin = np.where(swapped, sin, cos), np.where(swapped, cos, sin)
    return (
        np.where((quadrant == 1) | (quadrant == 2), -new_cos, new_cos),
        np.where(quadrant >= 2, -new_sin, new_sin),
    )


def _polynomial(terms: tuple[float, ...], x: _F64) -> _F64:
    total: _F64 = np.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        total = total * x + term
    return total
