"""The sampling settings of one turn, and their ranges. Needs no kernel, so a coordinator can check them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvferry.engine.errors import InvalidSampling

TOP_LOGPROBS_MAX: Final = 20  # as many as the OpenAI API allows
_COUNT_MAX: Final = 2**32 - 1  # top_k and repetition_window travel as uint32
_SEED_MAX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The settings of one turn; the defaults choose the most likely token.

    Fractions take effect as the nearest float32, which is what the wire carries.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0

    def validate(self) -> SamplingSettings:
        """These settings, if each lies in its range; else raises InvalidSampling naming setting, value and range."""
        _check_fraction("temperature", self.temperature, 0.0, 100.0)
        _check_count("top_k", self.top_k, _COUNT_MAX, "0 (all) to 4294967295")
        _check_fraction("top_p", self.top_p, 0.0, 1.0, is_open_below=True)
        _check_fraction("min_p", self.min_p, 0.0, 1.0)
        _check_fraction("repetition_penalty", self.repetition_penalty, 0.0, 10.0, is_open_below=True)
        _check_count("repetition_window", self.repetition_window, _COUNT_MAX, "0 (no tokens) to 4294967295")
        _check_count("seed", self.seed, _SEED_MAX, "0 to 18446744073709551615")
        _check_count("top_logprobs", self.top_logprobs, TOP_LOGPROBS_MAX, f"0 to {TOP_LOGPROBS_MAX}")
        return self


def _check_fraction(name: str, value: float, low: float, high: float, *, is_open_below: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    in_range = is_number and math.isfinite(value) and (low < value if is_open_below else low <= value) and value <= high
    if not in_range:
        allowed = f"above {low:g} and at most {high:g}" if is_open_below else f"between {low:g} and {high:g}"
        raise InvalidSampling(f"{name} is {value!r}; it must be a number {allowed}")


def _check_count(name: str, value: int, high: int, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise InvalidSampling(f"{name} is {value!r}; it must be a whole number from {allowed}")
