"""Recorded models by name, and running the engine over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.engine import Chunk, Engine
from kvferry.engine.kv_cache import KvSequence

TEXT_MODELS: Final = [
    "llama_tied_bf16",
    "qwen2_bias_f32",
    "qwen3_tied_bf16",
    "qwen3_untied_f32",
    "qwen3moe_bf16_sharded",
    "qwen3moe_mixed_f32",
    "qwen3moe_nonorm_f32",
]
KV_BYTES: Final = 1 << 25

F32 = NDArray[np.float32]


def run(engine: Engine, tokens: NDArray[np.int32], sizes: Sequence[int]) -> tuple[KvSequence, F32]:
    """Append the tokens in chunks of these sizes, over and over; returns the sequence and all logits."""
    sequence = engine.new_sequence()
    parts, start, i = [], 0, 0
    while start < len(tokens):
        part = tokens[start : start + sizes[i % len(sizes)]]
        parts.append(engine.forward([Chunk(sequence, part, "all")])[0])
        start += len(part)
        i += 1
    return sequence, np.concatenate(parts)


def rows(engine: Engine, sequence: KvSequence) -> tuple[F32, F32]:
    """K and V rows of all layers [n_layers, n_rows, kv_dim]."""
    g = engine.geometry
    k = np.empty((g.n_layers, sequence.n_rows, g.kv_dim), np.float32)
    v = np.empty_like(k)
    for layer in range(g.n_layers):
        sequence.read_rows(layer, 0, sequence.n_rows, k[layer], v[layer])
    return k, v


def bits(engine: Engine, sequence: KvSequence, logits: F32) -> bytes:
    """All that was computed, to be compared whole; lets the sequence go."""
    k, v = rows(engine, sequence)
    sequence.release()
    return logits.tobytes() + k.tobytes() + v.tobytes()
