"""The arithmetic of docs/numerics.md in plain numpy: slow, and meant to be obviously right.

Every kernel is compared with these functions bit for bit. All arrays are float32 unless a docstring says otherwise;
numpy's element-wise + - * / and sqrt are IEEE 754 operations, which is all that is used. Nothing else imports this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kernels.attention_ir import LOWEST_SCORE
from kvferry.engine.kernels.layout import KV_BLOCK, QUANT_BLOCK
from kvferry.engine.kernels.vector_ir import (
    EXP_COEFFICIENTS,
    EXP_MAX,
    EXP_MIN,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    QUANT_MAX,
    QUANT_SMALLEST,
)
from kvferry.engine.kernels.vision_ir import (
    ERF_COEFFICIENTS,
    ERF_P,
    GELU_CUBIC,
    GELU_FACTOR,
    SQRT_HALF,
)

F32 = NDArray[np.float32]
_f = np.float32


def fma(a: F32 | np.float32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """a * b + c, rounded once.

    The product is exact in float64. The sum is rounded to odd there (when it is inexact, its last bit is set), after
    which rounding to float32 gives what a single rounding of the exact sum gives.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    product, addend = np.broadcast_arrays(product, addend)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + towards, bits)
    return odd.view(np.float64).astype(np.float32)


def fold_halves(x: F32) -> F32:
    """Sum over the last axis (a power of two): lane i with lane i + n/2, then again on what is left."""
    while x.shape[-1] > 1:
        low, high = np.split(x, 2, axis=-1)
        x = low + high
    return x[..., 0]


def exp(x: F32) -> F32:
    x = np.minimum(np.maximum(x, _f(EXP_MIN)), _f(EXP_MAX))
    n = np.rint(x * _f(LOG2_E))
    r = fma(n, _f(-LN2_HIGH), x)
    r = fma(n, _f(-LN2_LOW), r)
    polynomial = np.full_like(r, EXP_COEFFICIENTS[-1])
    for coefficient in reversed(EXP_COEFFICIENTS[:-1]):
        polynomial = fma(polynomial, r, _f(coefficient))
    polynomial = fma(polynomial, r * r, r) + _f(1)
    return polynomial * np.ldexp(_f(1), n.astype(np.int32))


def silu(x: F32) -> F32:
    return x / (_f(1) + exp(-x))


def quantise(x: F32) -> tuple[NDArray[np.int8], F32]:
    """int8 values of x's shape, and the scale of each block of 32 [..., n_blocks]."""
    blocks = x.reshape(*x.shape[:-1], -1, QUANT_BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    counts = amax > _f(QUANT_SMALLEST)
    divisor = np.where(counts, amax, _f(1))
    scale = np.where(counts, amax / _f(QUANT_MAX), _f(0))
    inverse = np.where(counts, _f(QUANT_MAX) / divisor, _f(0))
    return np.rint(blocks * inverse[..., None]).astype(np.int8).reshape(x.shape), scale


def rms_norm(x: F32, weight: F32, epsilon: float) -> F32:
    squares = np.zeros((*x.shape[:-1], QUANT_BLOCK), np.float32)
    for block in range(x.shape[-1] // QUANT_BLOCK):
        values = x[..., block * QUANT_BLOCK : (block + 1) * QUANT_BLOCK]
        squares = fma(values, values, squares)
    root = np.sqrt(fold_halves(squares) / _f(x.shape[-1]) + _f(epsilon))
    return x * (_f(1) / root)[..., None] * weight


def linear(x: F32, q: NDArray[np.integer], d: F32, m: F32 | None) -> F32:
    """Quantised x [tokens, K] times weights [rows, K] of integers q, scales d and minima m [rows, K / 32].

    d [rows, K / 16] where each half of a block has its own.
    """
    values, scale = quantise(x)
    integers, weights = values.astype(np.int64), q.astype(np.int64)
    y = np.zeros((len(x), len(q)), np.float32)
    size = x.shape[1] // d.shape[1]
    for start in range(0, x.shape[1], size):
        block = start // QUANT_BLOCK
        s = scale[:, block, None]
        dot = integers[:, start : start + size] @ weights[:, start : start + size].T
        y = fma(dot.astype(np.float32) * s, d[:, start // size], y)
        if m is not None:
            block_sum = integers[:, start : start + size].sum(axis=1)
            y = fma(m[:, block], s * block_sum.astype(np.float32)[:, None], y)
    return y


def rope(x: F32, cos: F32, sin: F32, scale: float = 1.0) -> F32:
    """x [..., head_dim]; cos and sin [..., head_dim / 2]."""
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1) * _f(scale)


def dot(x: F32, y: F32) -> F32:
    """Dot products over the last axis, of floats."""
    sums = np.zeros((*np.broadcast_shapes(x.shape[:-1], y.shape[:-1]), QUANT_BLOCK), np.float32)
    for start in range(0, x.shape[-1], QUANT_BLOCK):
        part = slice(start, start + QUANT_BLOCK)
        sums = fma(x[..., part], y[..., part], sums)
    return fold_halves(sums)


def route(x: F32, router: F32, n_active: int, *, normalise: bool) -> tuple[NDArray[np.int64], F32]:
    """The experts of one normed row and their weights, best first. ``router`` [n_experts, hidden]."""
    logits = dot(x[None, :], router)
    powers = exp(logits - logits.max())
    total = _f(0)
    for power in powers:
        total = total + power
    probabilities = powers / total
    chosen = np.argsort(-probabilities, kind="stable")[:n_active]
    weights = probabilities[chosen]
    if normalise:
        total = _f(0)
        for weight in weights:
            total = total + weight
        weights = weights / total
    return chosen, weights


def layer_norm(x: F32, weight: F32, bias: F32, epsilon: float) -> F32:
    n = _f(x.shape[-1])
    sums = np.zeros((*x.shape[:-1], QUANT_BLOCK), np.float32)
    for start in range(0, x.shape[-1], QUANT_BLOCK):
        sums = sums + x[..., start : start + QUANT_BLOCK]
    centred = x - (fold_halves(sums) / n)[..., None]
    root = np.sqrt(dot(centred, centred) / n + _f(epsilon))
    return centred * (_f(1) / root)[..., None] * weight + bias


def gelu_tanh(x: F32) -> F32:
    inner = (x + x * x * x * _f(GELU_CUBIC)) * _f(GELU_FACTOR)
    return x / (_f(1) + exp(-inner))


def gelu_erf(x: F32) -> F32:
    z = np.abs(x) * _f(SQRT_HALF)
    ratio = _f(1) / fma(_f(ERF_P), z, _f(1))
    polynomial = np.full_like(x, ERF_COEFFICIENTS[-1])
    for coefficient in reversed(ERF_COEFFICIENTS[:-1]):
        polynomial = fma(polynomial, ratio, _f(coefficient))
    tail = polynomial * ratio * exp(-(z * z)) * _f(0.5)
    return x * np.where(x < 0, tail, _f(1) - tail)


def kept(rows: F32, kind: str) -> F32:
    """What attention reads of K or V rows [..., head_dim] that a cache of this kind ("f32", "f16", "q8") holds."""
    if kind == "f32":
        return rows
    if kind == "f16":
        return rows.astype(np.float16).astype(np.float32)
    values, scale = kept_q8(rows)
    return values.astype(np.float32) * scale[..., None]


def kept_q8(rows: F32) -> tuple[NDArray[np.int8], F32]:
    """int8 values of the rows' shape [..., head_dim], and the scale of each row [...]."""
    amax = np.abs(rows).max(axis=-1)
    counts = amax > _f(QUANT_SMALLEST)
    scale = np.where(counts, amax / _f(QUANT_MAX), _f(0))
    inverse = np.where(counts, _f(QUANT_MAX) / np.where(counts, amax, _f(1)), _f(0))
    return np.rint(rows * inverse[..., None]).astype(np.int8), scale


def attend(q: F32, k: F32, v: F32) -> F32:
    """One query row [head_dim] (roped, scaled) over the rows k, v [n, head_dim] at and before its position."""
    maximum = _f(LOWEST_SCORE)
    sums = np.zeros(KV_BLOCK, np.float32)
    output = np.zeros_like(q)
    for start in range(0, len(k), KV_BLOCK):
        k_block, v_block = k[start : start + KV_BLOCK], v[start : start + KV_BLOCK]
        scores = np.zeros(len(k_block), np.float32)
        for d in range(len(q)):
            scores = fma(q[d], k_block[:, d], scores)
        new = max(maximum, scores.max())
        rescale = exp(np.array([maximum - new], np.float32))[0]
        weights = np.zeros(KV_BLOCK, np.float32)
        weights[: len(scores)] = exp(scores - new)
        sums = fma(sums, rescale, weights)
        output = output * rescale
        for i in range(len(v_block)):
            output = fma(weights[i], v_block[i], output)
        maximum = new
    return output * (_f(1) / fold_halves(sums))
