"""Scalar arithmetic for sampling, with the same bits on every processor.

Nothing here calls a mathematics library, whose last bits differ between machines. IEEE + - * / and exact conversions
are all that is used; numba does not fuse or reorder them unless it is told to.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from kvferry.engine.kernels.jit import kernel

_LOG2_E: Final = 1.4426950408889634
# ln 2 in two parts: the first has 33 significant bits, so n * _LN2_HIGH is exact for every exponent n of a float64.
_LN2_HIGH: Final = 6.93147180369123816490e-01
_LN2_LOW: Final = 1.90821492927058770002e-10
_LN2: Final = 0.6931471805599453
_ROUND: Final = 6755399441055744.0  # 1.5 * 2^52: adding and subtracting it rounds a float64 to the nearest integer
_SQRT_HALF: Final = 0.7071067811865476

_MASK32: Final = np.uint64(0xFFFFFFFF)
_SHIFT32: Final = np.uint64(32)


@njit(inline="always")
def exp_nonpositive(x: Any) -> Any:
    """e^x for x <= 0, as float64; exactly 1 at 0, and 0 below -700.

    x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor series to r^10 / 10! in Horner form, times 2^n. The relative
    error is below 2.3e-13 < 2^-42, the remainder of the series; weights have 40 bits.
    """
    clamped = max(-700.0, x)
    n = (clamped * _LOG2_E + _ROUND) - _ROUND
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = np.int64((np.int64(n) + 1023) << 52).view(np.float64)
    return p * power if x > -700.0 else 0.0


@kernel
def log_positive(x: Any) -> Any:
    """ln x for a normal float64 x > 0.

    x = m 2^n with sqrt(1/2) <= m < sqrt(2); ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716, by its series to
    s^21 (remainder below 1e-18).
    """
    bits = np.float64(x).view(np.int64)
    n = (bits >> 52) - 1023
    m = np.int64((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).view(np.float64)
    if m * 0.5 >= _SQRT_HALF:
        m = m * 0.5
        n += 1
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    p = 1.0 / 21.0
    for k in range(19, 0, -2):
        p = p * s2 + 1.0 / k
    return n * _LN2 + 2.0 * s * p


@kernel
def philox_4x32_10(counter: Any, key: Any) -> Any:
    """The first 64 bits of Philox4x32 with ten rounds, for a 64-bit counter (the upper half is 0) and a 64-bit key.

    Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Word 0 is the low half of the
    result.
    """
    x0 = np.uint64(counter) & _MASK32
    x1 = np.uint64(counter) >> _SHIFT32
    x2 = np.uint64(0)
    x3 = np.uint64(0)
    k0 = np.uint64(key) & _MASK32
    k1 = np.uint64(key) >> _SHIFT32
    for _ in range(10):
        a = np.uint64(0xD2511F53) * x0
        b = np.uint64(0xCD9E8D57) * x2
        x0 = (b >> _SHIFT32) ^ x1 ^ k0
        x2 = (a >> _SHIFT32) ^ x3 ^ k1
        x1 = b & _MASK32
        x3 = a & _MASK32
        k0 = (k0 + np.uint64(0x9E3779B9)) & _MASK32
        k1 = (k1 + np.uint64(0xBB67AE85)) & _MASK32
    return (x1 << _SHIFT32) | x0


@kernel
def uniform(seed: Any, position: Any) -> Any:
    """A float64 in [0, 1), a multiple of 2^-53: the draw that belongs to this seed and this position."""
    return np.float64(philox_4x32_10(np.uint64(position), np.uint64(seed)) >> np.uint64(11)) * (
        1.0 / 9007199254740992.0
    )
