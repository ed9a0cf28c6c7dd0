"""Small random llama models, and the definition of arithmetic run over a whole one."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvferry.engine.files.gguf_file import GgufFile, GgufTensor, open_gguf
from kvferry.engine.kernels import definition
from kvferry.engine.rope import rope_table

_spec: Any = importlib.util.spec_from_file_location("gguf_blocks", Path(__file__).parents[1] / "gguf_blocks.py")
gguf_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gguf_blocks)


@dataclass(frozen=True)
class Shape:
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    kind: str
    tied: bool = True
    vocab: int = 100
    n_layers: int = 2
    wider: str | None = None  # the kind of v, down and the embedding, which files often hold in more bits


SHAPES = {
    "grouped by three": Shape(192, 3, 1, 64, 256, "q4_1"),
    "small heads, untied": Shape(64, 4, 2, 32, 96, "q8_0", tied=False),
    "large heads": Shape(96, 2, 1, 128, 64, "q4_0"),
    "grouped by five": Shape(64, 5, 1, 32, 64, "q4_1", vocab=64),
    "4 and 6 bits": Shape(256, 4, 2, 64, 256, "q4_k", wider="q6_k"),
    "5 and 6 bits": Shape(256, 4, 1, 64, 512, "q5_k", wider="q6_k", n_layers=1, tied=False),
    "5 bits in small blocks": Shape(96, 3, 1, 64, 96, "q5_0", wider="q5_1"),
}


def write_model(path: Path, shape: Shape, seed: int = 0) -> GgufFile:
    """Write a random model of this shape as GGUF and open it."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    query, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim

    def matrix(name: str, rows: int, cols: int, kind: str = shape.kind) -> None:
        seed, deviation = int(random.integers(1 << 30)), 2 / float(np.sqrt(cols))
        stored = gguf_blocks.random_rows(kind, rows, cols, seed, deviation)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=gguf_blocks.library_kind(kind))

    def vector(name: str) -> None:
        writer.add_tensor(f"{name}.weight", (1 + random.standard_normal(shape.hidden) / 8).astype(np.float32))

    wider = shape.wider or shape.kind
    matrix("token_embd", shape.vocab, shape.hidden, shape.wider or "q8_0")
    vector("output_norm")
    if not shape.tied:
        matrix("output", shape.vocab, shape.hidden)
    for layer in range(shape.n_layers):
        vector(f"blk.{layer}.attn_norm")
        vector(f"blk.{layer}.ffn_norm")
        for name, rows, cols in (
            ("attn_q", query, shape.hidden),
            ("attn_k", kv, shape.hidden),
            ("attn_v", kv, shape.hidden),
            ("attn_output", shape.hidden, query),
            ("ffn_gate", shape.ffn, shape.hidden),
            ("ffn_up", shape.ffn, shape.hidden),
            ("ffn_down", shape.hidden, shape.ffn),
        ):
            matrix(f"blk.{layer}.{name}", rows, cols, wider if name in {"attn_v", "ffn_down"} else shape.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


def integers(tensor: GgufTensor) -> tuple[NDArray, NDArray, NDArray | None]:
    """A tensor's integers [rows, cols], scales and minima; see gguf_blocks.parts."""
    return gguf_blocks.parts(tensor.kind, np.asarray(tensor.data))


def half_split_rows(n_rows: int, head_dim: int) -> NDArray[np.int64]:
    """Source row of each row, from heads of rope pairs (2i, 2i + 1) to heads of pairs (i, i + head_dim / 2)."""
    in_head = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    heads = np.arange(0, n_rows, head_dim)
    return (heads[:, None] + in_head[None, :]).reshape(-1)


def defined_forward(file: GgufFile, token_ids: NDArray[np.int32], kv: str = "f32") -> tuple[NDArray, NDArray, NDArray]:
    """Logits [n, vocab] and K, V rows [n_layers, n, kv_dim] by the definition, token after token."""
    config = file.config
    n, head_dim = len(token_ids), config.head_dim
    angles = rope_table(n, head_dim, config.rope_theta)
    cos, sin = angles[:, 0][:, None], angles[:, 1][:, None]

    def vector(name: str) -> NDArray:
        return np.asarray(file.tensors[f"{name}.weight"].data).reshape(-1).view(np.float32)

    def linear(x: NDArray, name: str, *, paired: bool = False) -> NDArray:
        q, d, m = integers(file.tensors[f"{name}.weight"])
        order = half_split_rows(len(q), head_dim) if paired else np.arange(len(q))
        return definition.linear(x, q[order], d[order], None if m is None else m[order])

    embedding = file.tensors["token_embd.weight"]
    x = gguf_blocks.elements(embedding.kind, np.asarray(embedding.data))[token_ids]
    k_rows = np.empty((config.n_layers, n, config.kv_dim), np.float32)
    v_rows = np.empty_like(k_rows)
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    for layer in range(config.n_layers):
        prefix = f"blk.{layer}."
        normed = definition.rms_norm(x, vector(f"{prefix}attn_norm"), config.rms_eps)
        queries = linear(normed, f"{prefix}attn_q", paired=True).reshape(n, -1, head_dim)
        queries = definition.rope(queries, cos, sin, scale)
        keys = linear(normed, f"{prefix}attn_k", paired=True).reshape(n, -1, head_dim)
        keys = definition.kept(definition.rope(keys, cos, sin), kv)
        values = definition.kept(linear(normed, f"{prefix}attn_v").reshape(n, -1, head_dim), kv)
        k_rows[layer], v_rows[layer] = keys.reshape(n, -1), values.reshape(n, -1)
        attended = np.empty_like(queries)
        for position in range(n):
            for head in range(config.n_heads):
                kv_head = head // (config.n_heads // config.n_kv_heads)
                past = slice(0, position + 1)
                attended[position, head] = definition.attend(
                    queries[position, head], keys[past, kv_head], values[past, kv_head]
                )
        x = x + linear(attended.reshape(n, -1), f"{prefix}attn_output")
        normed = definition.rms_norm(x, vector(f"{prefix}ffn_norm"), config.rms_eps)
        gated = definition.silu(linear(normed, f"{prefix}ffn_gate")) * linear(normed, f"{prefix}ffn_up")
        x = x + linear(gated, f"{prefix}ffn_down")
    normed = definition.rms_norm(x, vector("output_norm"), config.rms_eps)
    return linear(normed, "token_embd" if config.tied_embeddings else "output"), k_rows, v_rows
