"""Arithmetic that the parts share. Rows are tokens: x is float32 [n, size]."""

from __future__ import annotations

from math import erf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_SQRT_TWO_OVER_PI: Final = np.float32(0.7978845608028654)
_erf: Final = np.frompyfunc(erf, 1, 1)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    return _f32(x / np.sqrt(mean_square + np.float32(eps)) * weight)


def layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    centred = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True, dtype=np.float32)
    return _f32(centred / np.sqrt(variance + np.float32(eps)) * weight + bias)


def silu(x: F32) -> F32:
    with np.errstate(over="ignore"):  # exp of a large number is infinite, and the quotient then 0, as it should be
        return _f32(x / (np.float32(1) + np.exp(-x)))


def gelu_tanh(x: F32) -> F32:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016)."""
    inner = _SQRT_TWO_OVER_PI * (x + np.float32(0.044715) * x * x * x)
    return _f32(np.float32(0.5) * x * (np.float32(1) + np.tanh(inner)))


def gelu_erf(x: F32) -> F32:
    """GELU itself."""
    error_function = _erf(x.astype(np.float64) / np.sqrt(2.0)).astype(np.float32)
    return _f32(np.float32(0.5) * x * (np.float32(1) + error_function))


def softmax(x: F32) -> F32:
    """Over the last axis; -inf weighs nothing."""
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return _f32(powers / np.sum(powers, axis=-1, keepdims=True, dtype=np.float32))


def inverse_frequencies(n: int, theta: float) -> F32:
    """theta^(-i / n) for i < n, float32 [n]."""
    return _f32(1.0 / theta ** (np.arange(n) / n))


def rotate(x: F32, angles: F32) -> F32:
    """Rope: elements i and i + size/2 of each head turned by angle i. x [n, heads, size], angles [n, size/2]."""
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _f32(x: NDArray[Any]) -> F32:
    """What is float32 already, said to the type checker; anything else rounded to it."""
    return x.astype(np.float32, copy=False)
