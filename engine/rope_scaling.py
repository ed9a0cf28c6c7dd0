"""Rope for longer contexts than a model was first trained for: what each frequency is divided by, and what cosines and
sines are multiplied by.

- linear: all by one factor (Chen et al. 2023, "Extending context window of large language models via positional
  interpolation").
- llama3: those slower than the original context by a factor, fast ones not at all, in between by a mix (the Llama 3.1
  models).
- yarn: the same with a ramp over the frequencies' number, and a magnitude (Peng et al. 2023, "YaRN").

40-digit decimals, rounded to float32 once: the same on every machine.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Final

import numpy as np

_TWO_PI: Final = Decimal("6.28318530717958647692528676655900576839433879875021")
_DIGITS: Final = 40

Divisors = tuple[float, ...]


def linear_divisors(head_dim: int, factor: float) -> Divisors:
    """The same for all head_dim / 2 frequencies."""
    return (_float32(Decimal(factor)),) * (head_dim // 2)


def llama3_divisors(
    head_dim: int, theta: float, *, factor: float, low: float, high: float, original_context: int
) -> Divisors:
    """``low`` and ``high``: how often a frequency turns within the original context so that it is slow, or fast."""
    with localcontext() as context:
        context.prec = _DIGITS
        divisors = []
        for frequency in _frequencies(head_dim, theta):
            turns = original_context * frequency / _TWO_PI
            share = min(max((turns - Decimal(low)) / (Decimal(high) - Decimal(low)), Decimal(0)), Decimal(1))
            divisors.append(_float32(_mixed(share, Decimal(factor))))
        return tuple(divisors)


def yarn_divisors(
    head_dim: int, theta: float, *, factor: float, fast: float = 32.0, slow: float = 1.0, original_context: int
) -> Divisors:
    """``fast`` and ``slow``: turns within the original context at the ramp's ends."""
    with localcontext() as context:
        context.prec = _DIGITS
        first = max(_number_that_turns(fast, head_dim, theta, original_context).to_integral(ROUND_FLOOR), Decimal(0))
        last = _number_that_turns(slow, head_dim, theta, original_context).to_integral(ROUND_CEILING)
        last = min(last, Decimal(head_dim - 1))
        width = last - first if last > first else Decimal("0.001")
        shares = (1 - min(max((i - first) / width, Decimal(0)), Decimal(1)) for i in range(head_dim // 2))
        return tuple(_float32(_mixed(share, Decimal(factor))) for share in shares)


def yarn_magnitude(factor: float) -> float:
    """What the paper multiplies cosines and sines by: 0.1 ln(factor) + 1."""
    with localcontext() as context:
        context.prec = _DIGITS
        return float(Decimal("0.1") * Decimal(factor).ln() + 1) if factor > 1 else 1.0


def _frequencies(head_dim: int, theta: float) -> list[Decimal]:
    log_theta = Decimal(theta).ln()
    return [(-log_theta * 2 * i / head_dim).exp() for i in range(head_dim // 2)]


def _number_that_turns(turns: float, head_dim: int, theta: float, original_context: int) -> Decimal:
    """Which frequency (a fraction, perhaps) turns so often within the original context."""
    return head_dim * (original_context / (Decimal(turns) * _TWO_PI)).ln() / (2 * Decimal(theta).ln())


def _mixed(share: Decimal, factor: Decimal) -> Decimal:
    """The divisor of a frequency that is kept to that share and slowed down for the rest."""
    return 1 / (share + (1 - share) / factor)


def _float32(value: Decimal) -> float:
    return float(np.float32(float(value)))
