"""One decoder layer: attention with rope over a growing cache, and a gated feed-forward part."""

from __future__ import annotations

import numpy as np

from kvferry.engine.config import ModelConfig
from kvferry.engine.reference.layers import F32, inverse_frequencies, rms_norm, rotate, silu, softmax
from kvferry.engine.reference.weights import Weights


def rope_angles(positions: F32, config: ModelConfig) -> F32:
    """Angles [n, head_dim/2] of tokens at positions [3, n] (time, row, column; equal for text).

    Interleaved M-RoPE: frequency i turns by the row if i % 3 is 1, by the column if it is 2, as far as their shares of
    ``mrope_section`` reach; all others turn by time.
    """
    frequencies: F32 = inverse_frequencies(config.head_dim // 2, config.rope_theta)
    if config.rope_divisors is not None:
        frequencies /= np.array(config.rope_divisors, np.float32)
    angles: F32 = positions[:, :, None] * frequencies
    mixed: F32 = angles[0].copy()
    if config.mrope_section is None:
        return mixed
    for axis in (1, 2):
        own = slice(axis, 3 * config.mrope_section[axis], 3)
        mixed[:, own] = angles[axis][:, own]
    return mixed


def project(x: F32, weights: Weights, config: ModelConfig, angles: F32) -> tuple[F32, F32, F32]:
    """q [n, heads, head_dim], k and v [n, kv_heads, head_dim] of rows x; q and k normed (if so) and turned."""
    q, k, v = (weights.linear(x, name).reshape(len(x), -1, config.head_dim) for name in ("attn_q", "attn_k", "attn_v"))
    if config.qk_norm:
        q = rms_norm(q, weights.vector("attn_q_norm"), config.rms_eps)
        k = rms_norm(k, weights.vector("attn_k_norm"), config.rms_eps)
    magnitude = np.float32(config.rope_magnitude)
    return rotate(q, angles) * magnitude, rotate(k, angles) * magnitude, v


def attend(q: F32, k: F32, v: F32) -> F32:
    """Causal attention of the last n rows over all m. q [n, heads, d], k and v [m, kv_heads, d] to [n, heads * d]."""
    n_new, n_heads, head_dim = q.shape
    n_all, n_kv_heads, _ = k.shape
    grouped = q.reshape(n_new, n_kv_heads, -1, head_dim)  # query heads that share a KV head are neighbours
    scores = np.einsum("nghd,mgd->ghnm", grouped, k, optimize=True) / np.float32(np.sqrt(head_dim))
    is_later = np.arange(n_all)[None, :] > np.arange(n_all - n_new, n_all)[:, None]
    scores = np.where(is_later, np.float32(-np.inf), scores)
    mixed: F32 = np.einsum("ghnm,mgd->nghd", softmax(scores), v, optimize=True)
    return mixed.reshape(n_new, n_heads * head_dim)


def gated(x: F32, weights: Weights) -> F32:
    """The feed-forward part of a dense layer."""
    return weights.linear(silu(weights.linear(x, "ffn_gate")) * weights.linear(x, "ffn_up"), "ffn_down")
