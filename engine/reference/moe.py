"""A choice of experts in place of the feed-forward part (Qwen3-MoE)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import MoeConfig
from kvferry.engine.reference.layers import F32, silu, softmax
from kvferry.engine.reference.weights import Weights


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router decided: logits [n, experts], the chosen experts and their weights [n, n_active], best first."""

    logits: F32
    expert_ids: NDArray[np.int64]
    weights: F32


def route(x: F32, weights: Weights, moe: MoeConfig) -> Routing:
    """Softmax over all experts, then the best; of equal ones the first."""
    logits = weights.linear(x, "router")
    probabilities = softmax(logits)
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, : moe.n_active]
    scores = np.take_along_axis(probabilities, chosen, axis=-1)
    if moe.normalise:
        scores = scores / np.sum(scores, axis=-1, keepdims=True, dtype=np.float32)
    return Routing(logits, chosen, scores)


def mixture(x: F32, weights: Weights, moe: MoeConfig) -> tuple[F32, Routing]:
    """x [n, hidden] through its tokens' experts: the sum of their outputs by weight."""
    routing = route(x, weights, moe)
    total = np.zeros_like(x)
    for expert in np.unique(routing.expert_ids):
        rows, places = np.nonzero(routing.expert_ids == expert)
        own = weights.part(f"experts.{expert}.")
        inner = silu(own.linear(x[rows], "gate")) * own.linear(x[rows], "up")
        total[rows] += own.linear(inner, "down") * routing.weights[rows, places][:, None]
    return total, routing
