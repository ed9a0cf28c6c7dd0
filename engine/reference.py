"""The float path: dequantised weights, float32 activations, plain numpy. What the quantised path is measured against.

Slow and memory-hungry (4 bytes per weight), and its bits depend on numpy's BLAS: it judges quality, never the bit
contract. ``kvferry score --reference`` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from kvferry.engine.files.gguf_file import GgufFile, open_gguf
from kvferry.engine.packing import half_split_rows
from kvferry.engine.rope import rope_table

_F32 = NDArray[np.float32]


@dataclass(frozen=True)
class ReferenceOutput:
    """``logits`` [n, vocab]; ``k`` (after rope) and ``v`` [n_layers, n, kv_dim]; ``greedy_ids`` int32 [n_greedy]."""

    logits: _F32
    k: _F32
    v: _F32
    greedy_ids: NDArray[np.int32]


class ReferenceModel:
    """A llama model in float32."""

    def __init__(self, file: GgufFile) -> None:
        self.config: Final = file.config
        self._file = file
        self._dequantised: dict[str, _F32] = {}

    @classmethod
    def load(cls, path: Path) -> ReferenceModel:
        """Raises as ``open_gguf`` does. A tensor is dequantised when it is first needed, and kept."""
        return cls(open_gguf(path))

    def forward(self, token_ids: NDArray[np.int32], *, n_greedy: int = 0) -> ReferenceOutput:
        """Run a text from position 0, and then, anew for each, ``n_greedy`` steps of the likeliest token."""
        logits, k, v = self._run(token_ids)
        text, last = list(token_ids), logits[-1]
        for i in range(n_greedy):
            text.append(np.int32(np.argmax(last)))
            if i + 1 < n_greedy:
                last = self._run(np.array(text, np.int32))[0][-1]
        return ReferenceOutput(logits, k, v, np.array(text[len(token_ids) :], np.int32))

    def _run(self, token_ids: NDArray[np.int32]) -> tuple[_F32, _F32, _F32]:
        config = self.config
        n = len(token_ids)
        x = self._weights("token_embd.weight")[token_ids]
        angles = rope_table(n, config.head_dim, config.rope_theta)
        k_rows = np.empty((config.n_layers, n, config.kv_dim), np.float32)
        v_rows = np.empty_like(k_rows)
        for layer in range(config.n_layers):
            prefix = f"blk.{layer}."
            normed = self._norm(x, f"{prefix}attn_norm.weight")
            q = _rope(self._project(normed, f"{prefix}attn_q", paired=True).reshape(n, config.n_heads, -1), angles)
            k = _rope(self._project(normed, f"{prefix}attn_k", paired=True).reshape(n, config.n_kv_heads, -1), angles)
            v = self._project(normed, f"{prefix}attn_v").reshape(n, config.n_kv_heads, -1)
            k_rows[layer], v_rows[layer] = k.reshape(n, -1), v.reshape(n, -1)
            x = x + self._project(_attend(q, k, v), f"{prefix}attn_output")
            normed = self._norm(x, f"{prefix}ffn_norm.weight")
            gate = self._project(normed, f"{prefix}ffn_gate")
            gated = gate / (1 + np.exp(-gate)) * self._project(normed, f"{prefix}ffn_up")
            x = x + self._project(gated, f"{prefix}ffn_down")
        normed = self._norm(x, "output_norm.weight")
        head = "token_embd.weight" if config.tied_embeddings else "output.weight"
        return normed @ self._weights(head).T, k_rows, v_rows

    def _norm(self, x: _F32, name: str) -> _F32:
        scale = 1 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(self.config.rms_eps))
        return (x * scale * self._weights(name)[0]).astype(np.float32)

    def _project(self, x: _F32, name: str, *, paired: bool = False) -> _F32:
        weights = self._weights(f"{name}.weight")
        if paired and self.config.rope_adjacent_pairs:
            weights = weights[half_split_rows(len(weights), self.config.head_dim)]
        return x @ weights.T

    def _weights(self, name: str) -> _F32:
        """A tensor as float32 [rows, cols]; a vector has one row."""
        if name not in self._dequantised:
            tensor = self._file.tensors[name]
            kind = GGMLQuantizationType[tensor.kind.upper()]
            weights = np.asarray(quants.dequantize(np.asarray(tensor.data), kind), np.float32)
            self._dequantised[name] = weights.reshape(tensor.shape)
        return self._dequantised[name]


def _rope(x: _F32, angles: _F32) -> _F32:
    """Turn [n, heads, head_dim] by the angles of positions 0 .. n - 1, pairs (i, i + head_dim / 2)."""
    cos, sin = angles[:, 0][:, None, :], angles[:, 1][:, None, :]
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attend(q: _F32, k: _F32, v: _F32) -> _F32:
    """Causal attention; q [n, heads, head_dim], k and v [n, KV heads, head_dim]; returns [n, heads * head_dim]."""
    n, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    future = np.triu(np.ones((n, n), bool), 1)
    out = np.empty_like(q)
    for head in range(n_heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(np.float32(head_dim))
        scores[future] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group]
    return out.reshape(n, -1)
