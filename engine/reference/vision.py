"""The vision tower of Qwen3-VL: a transformer over patches, and the mergers that make image tokens of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import VisionConfig
from kvferry.engine.reference.layers import (
    F32,
    gelu_erf,
    gelu_tanh,
    inverse_frequencies,
    layer_norm,
    rotate,
    softmax,
)
from kvferry.engine.reference.weights import Weights
from kvferry.engine.vision.positions import Grid, patch_places, position_weights


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the tower makes of images: ``embeds`` [tokens, hidden], ``deepstack`` [features, tokens, hidden].

    ``patch_embed``, ``first`` (with position embeddings) and ``last`` [patches, size] are its rows on the way.
    """

    embeds: F32
    deepstack: F32
    patch_embed: F32
    first: F32
    last: F32


def run_tower(pixel_values: F32, grids: Sequence[Grid], weights: Weights, vision: VisionConfig) -> ImageFeatures:
    """All images at once: their patches [patches, elements] one image after the other. Each attends to itself only."""
    patch_embed = weights.linear(pixel_values, "patch")
    x = first = patch_embed + np.concatenate([_position_embeddings(grid, weights, vision) for grid in grids])
    angles = np.concatenate([_angles(grid, vision) for grid in grids])
    ends = np.cumsum([grid.n_patches for grid in grids])
    features: dict[int, F32] = {}
    for i in range(vision.n_layers):
        block = weights.part(f"blocks.{i}.")
        x = x + _attention(_norm(x, block, "norm1", vision), block, angles, ends, vision)
        x = x + block.linear(gelu_tanh(block.linear(_norm(x, block, "norm2", vision), "fc1")), "fc2")
        if i in vision.deepstack_layers:
            merger = weights.part(f"deepstack.{vision.deepstack_layers.index(i)}.")
            features[i] = _mlp(_norm(_merged(x, vision), merger, "norm", vision), merger)
    merger = weights.part("merger.")
    embeds = _mlp(_merged(_norm(x, merger, "norm", vision), vision), merger)
    deepstack = np.stack([features[i] for i in vision.deepstack_layers]) if features else np.empty((0, *embeds.shape))
    return ImageFeatures(embeds, deepstack.astype(np.float32), patch_embed, first, x)


def _position_embeddings(grid: Grid, weights: Weights, vision: VisionConfig) -> F32:
    table = weights.matrix("positions")
    indices, shares = position_weights(grid, vision)
    mixed: F32 = np.sum(table[indices] * shares[:, :, None], axis=0, dtype=np.float32)
    return mixed


def _angles(grid: Grid, vision: VisionConfig) -> F32:
    """Rope angles [patches, head_dim/2]: half of the frequencies turn by the row, the other half by the column."""
    frequencies = inverse_frequencies(vision.head_dim // 4, vision.rope_theta)
    row, col = (place.astype(np.float32) for place in patch_places(grid, vision.merge_size))
    return np.concatenate([row[:, None] * frequencies, col[:, None] * frequencies], axis=1)


def _attention(x: F32, block: Weights, angles: F32, ends: NDArray[np.int64], vision: VisionConfig) -> F32:
    qkv = block.linear(x, "qkv").reshape(len(x), 3, vision.n_heads, vision.head_dim)
    q, k, v = rotate(qkv[:, 0], angles), rotate(qkv[:, 1], angles), qkv[:, 2]
    rows: list[F32] = []
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        scores = np.einsum("nhd,mhd->hnm", q[start:stop], k[start:stop], optimize=True)
        shares = softmax(scores / np.float32(np.sqrt(vision.head_dim)))
        rows.append(np.einsum("hnm,mhd->nhd", shares, v[start:stop], optimize=True).reshape(stop - start, -1))
    return block.linear(np.concatenate(rows), "out")


def _norm(x: F32, weights: Weights, name: str, vision: VisionConfig) -> F32:
    return layer_norm(x, weights.vector(name), weights.vector(f"{name}_bias"), vision.norm_eps)


def _merged(x: F32, vision: VisionConfig) -> F32:
    """The patches of one token beside each other: [patches, size] to [tokens, size * merge_size squared]."""
    return x.reshape(-1, x.shape[1] * vision.merge_size**2)


def _mlp(x: F32, merger: Weights) -> F32:
    return merger.linear(gelu_erf(merger.linear(x, "fc1")), "fc2")
