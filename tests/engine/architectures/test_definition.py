"""Whole recorded models, read and quantised by the engine, are to the bit what the definition of arithmetic says."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kernels import definition
from kvferry.engine.rope import rope_table

spec = importlib.util.spec_from_file_location("recorded_models", Path(__file__).parent / "recorded_models.py")
models = importlib.util.module_from_spec(spec)
sys.modules["recorded_models"] = models
spec.loader.exec_module(models)

F32 = NDArray[np.float32]


@pytest.mark.parametrize(
    ("name", "quant"), [*((name, "q8") for name in models.TEXT_MODELS), ("qwen3moe_mixed_f32", "q4")]
)
def test_a_whole_model(name: str, quant: str, recorded: Callable[[str], Path]) -> None:
    folder = recorded(name) / "model"
    ids = np.random.default_rng(5).integers(0, 500, 41).astype(np.int32)
    logits, k, v = Defined(open_model(folder), quant).forward(ids)
    engine = Engine.load(folder, EngineOptions(n_threads=2, kv_bytes=models.KV_BYTES, quant=quant))
    try:
        sequence, found = models.run(engine, ids, [40, 1])
        found_k, found_v = models.rows(engine, sequence)
    finally:
        engine.close()
    assert found.tobytes() == logits.tobytes()
    assert found_k.tobytes() == k.tobytes()
    assert found_v.tobytes() == v.tobytes()


class Defined:
    """docs/numerics.md over one model, token after token."""

    def __init__(self, file: ModelFile, quant: str) -> None:
        self.file, self.config, self.quant = file, file.config, quant

    def forward(self, ids: NDArray[np.int32]) -> tuple[F32, F32, F32]:
        config = self.config
        x = self.elements("embedding")[ids]
        k_rows = np.empty((config.n_layers, len(ids), config.kv_dim), np.float32)
        v_rows = np.empty_like(k_rows)
        for i in range(config.n_layers):
            q, k, v = self.projected(self.normed(x, f"layers.{i}.attn_norm"), f"layers.{i}.")
            k_rows[i], v_rows[i] = k.reshape(len(ids), -1), v.reshape(len(ids), -1)
            x = x + self.linear(attended(q, k, v), f"layers.{i}.attn_o")
            h = self.normed(x, f"layers.{i}.ffn_norm")
            if config.is_sparse(i):
                x = x + np.stack([self.mixture(row, f"layers.{i}.") for row in h])
            else:
                x = x + self.gated(h, f"layers.{i}.ffn_")
        head = "embedding" if config.tied_embeddings else "head"
        return self.linear(self.normed(x, "output_norm"), head), k_rows, v_rows

    def projected(self, h: F32, prefix: str) -> tuple[F32, F32, F32]:
        config = self.config
        angles = rope_table(len(h), config.head_dim, config.rope_theta)
        cos, sin = angles[:, 0][:, None], angles[:, 1][:, None]
        heads = {}
        for part in ("q", "k", "v"):
            y = self.linear(h, f"{prefix}attn_{part}")
            if config.qkv_bias:
                y = y + self.vector(f"{prefix}attn_{part}_bias")
            heads[part] = y.reshape(len(h), -1, config.head_dim)
        if config.qk_norm:
            for part in ("q", "k"):
                weight = self.vector(f"{prefix}attn_{part}_norm")
                heads[part] = definition.rms_norm(heads[part], weight, config.rms_eps)
        scale = np.float32(1) / np.sqrt(np.float32(config.head_dim))
        return definition.rope(heads["q"], cos, sin, scale), definition.rope(heads["k"], cos, sin), heads["v"]

    def mixture(self, h: F32, prefix: str) -> F32:
        moe = self.config.moe
        assert moe is not None
        router = self.file.tensors[f"{prefix}router"].read()
        experts, weights = definition.route(h, router, moe.n_active, normalise=moe.normalise)
        total = np.zeros_like(h)
        for expert, weight in zip(experts, weights, strict=True):
            total = definition.fma(weight, self.gated(h[None], f"{prefix}experts.{expert}.")[0], total)
        return total

    def gated(self, h: F32, prefix: str) -> F32:
        gate, up = self.linear(h, f"{prefix}gate"), self.linear(h, f"{prefix}up")
        return self.linear(definition.silu(gate) * up, f"{prefix}down")

    def normed(self, x: F32, name: str) -> F32:
        return definition.rms_norm(x, self.vector(name), self.config.rms_eps)

    def vector(self, name: str) -> F32:
        return self.file.tensors[name].read()[0]

    def linear(self, x: F32, name: str) -> F32:
        return definition.linear(x, *self.integers(name))

    def elements(self, name: str) -> F32:
        q, d, _ = self.integers(name)
        return np.repeat(d, 32, axis=1) * q.astype(np.float32)

    def integers(self, name: str) -> tuple[NDArray[np.integer], F32, F32 | None]:
        """Weights as docs/numerics.md quantises them: integers [rows, cols], scales and minima [rows, cols / 32]."""
        rows = self.file.tensors[name].read()
        blocks = rows.reshape(len(rows), -1, 32)
        q4 = name.endswith((".attn_q", ".attn_o", ".ffn_gate", ".ffn_up", ".gate", ".up", ".down"))
        if self.quant == "q8" or not q4:
            d = as_half(np.abs(blocks).max(axis=-1) / np.float32(127))
            q = np.clip(np.rint(blocks / d[..., None]), -127, 127)
            return q.astype(np.int64).reshape(rows.shape), d, None
        m = as_half(blocks.min(axis=-1))
        d = as_half((blocks.max(axis=-1) - blocks.min(axis=-1)) / np.float32(15))
        q = np.clip(np.rint((blocks - m[..., None]) / d[..., None]), 0, 15)
        return q.astype(np.int64).reshape(rows.shape), d, m


def as_half(x: F32) -> F32:
    return x.astype(np.float16).astype(np.float32)


def attended(q: F32, k: F32, v: F32) -> F32:
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for position in range(len(q)):
        for head in range(q.shape[1]):
            past = slice(0, position + 1)
            out[position, head] = definition.attend(q[position, head], k[past, head // group], v[past, head // group])
    return out.reshape(len(q), -1)
