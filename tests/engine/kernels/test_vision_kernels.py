"""The vision tower's kernels against the definition of their arithmetic, and against mathematics."""

from __future__ import annotations

from math import erf

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.kernels import definition, vision

F32 = NDArray[np.float32]


def address(array: F32) -> int:
    return array.ctypes.data


def random(*shape: int, seed: int = 1) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_layer_norm() -> None:
    x, weight, bias = random(3, 96) * 4 + 2, random(96, seed=2), random(96, seed=3)
    out = np.empty_like(x)
    vision.layer_norm_rows(address(x), 3, 3, address(weight), address(bias), np.float32(1e-6), address(out))
    assert out.tobytes() == definition.layer_norm(x, weight, bias, 1e-6).tobytes()
    exact = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True) * weight + bias
    assert np.abs(out - exact).max() < 1e-5


@pytest.mark.parametrize("by_erf", [0, 1])
def test_gelu(by_erf: int) -> None:
    x = np.linspace(-12, 12, 320).astype(np.float32).reshape(2, 160)
    found = x.copy()
    vision.gelu_rows(address(found), 2, 5, by_erf)
    assert found.tobytes() == (definition.gelu_erf(x) if by_erf else definition.gelu_tanh(x)).tobytes()
    share = 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2.0)))
    if not by_erf:
        share = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)))
    assert np.abs(found - x * share).max() < 2e-6


@pytest.mark.parametrize("n", [1, 31, 32, 77])
def test_attention_over_a_whole_image(n: int) -> None:
    size = 64
    q, k, v = random(n, size) / 8, random(n, size, seed=2), random(n, size, seed=3)
    n_tiles = -(-n // 32)
    tiles = np.full((2, n_tiles * 32, size), np.nan, np.float32)  # what is beyond the patches is never used
    tiles[0, :n], tiles[1, :n] = k, v
    k_tiles = np.ascontiguousarray(tiles[0].reshape(n_tiles, 32, size).transpose(0, 2, 1))
    out, scratch = np.empty_like(q), np.empty(vision.TILE_FLOATS, np.float32)
    vision.attend_head(address(q), address(k_tiles), address(tiles[1]), n, size, address(out), address(scratch))
    assert out.tobytes() == np.stack([definition.attend(row, k, v) for row in q]).tobytes()
