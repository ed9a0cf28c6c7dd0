"""A setting outside its range is refused by name, with its value and the range."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from kvferry.engine.errors import InvalidSampling
from kvferry.engine.sampling_settings import SamplingSettings


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -1, "between 0 and 100"),
        ("temperature", 100.5, "between 0 and 100"),
        ("temperature", math.nan, "between 0 and 100"),
        ("temperature", math.inf, "between 0 and 100"),
        ("temperature", True, "between 0 and 100"),
        ("temperature", "hot", "between 0 and 100"),
        ("top_k", -1, "0 (all) to 4294967295"),
        ("top_k", 2**32, "0 (all) to 4294967295"),
        ("top_k", 1.5, "0 (all) to 4294967295"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("min_p", -0.1, "between 0 and 1"),
        ("min_p", math.nan, "between 0 and 1"),
        ("repetition_penalty", 0.0, "above 0 and at most 10"),
        ("repetition_penalty", -math.inf, "above 0 and at most 10"),
        ("repetition_window", -1, "0 (no tokens) to 4294967295"),
        ("seed", -1, "0 to 18446744073709551615"),
        ("seed", 2**64, "0 to 18446744073709551615"),
        ("top_logprobs", 21, "0 to 20"),
    ],
)
def test_a_value_outside_the_range_is_refused(name: str, value: Any, allowed: str) -> None:
    settings = dataclasses.replace(SamplingSettings(), **{name: value})
    with pytest.raises(InvalidSampling) as caught:
        settings.validate()
    assert str(caught.value).startswith(f"{name} is {value!r}; it must be a ")
    assert str(caught.value).endswith(allowed)
    assert caught.value.code == "invalid_sampling"


def test_the_ends_of_the_ranges_are_allowed() -> None:
    low = SamplingSettings(temperature=0, top_p=1e-9, min_p=0, repetition_penalty=1e-9, repetition_window=0)
    high = SamplingSettings(
        temperature=100, top_k=2**32 - 1, top_p=1, min_p=1, repetition_penalty=10, seed=2**64 - 1, top_logprobs=20
    )
    assert low.validate() is low
    assert high.validate() is high


def test_checking_settings_needs_no_kernel() -> None:
    code = "import sys, kvferry.engine.sampling_settings; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
