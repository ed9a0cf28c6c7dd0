"""Made-up model files of a real model's shape, for measuring what does not fit a small one: the weights are random.

Every layer has the same numbers, which no engine can make use of; the text part is the smallest that is one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from kvferry.engine.files.catalogue import cache_root

_VERSION: Final = 1  # of what is written; part of the file's name


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder with tied embeddings."""

    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int


SHAPES: Final = {"qwen3-1.7b-shape": Shape(28, 2048, 6144, 16, 8, 128, 151_936)}


def shape_file(name: str) -> Path:
    """The file of one of SHAPES in the cache (1.2 GB), q4_1 with a q8_0 head; written when it is not there."""
    target = cache_root() / "bench" / f"{name}.v{_VERSION}.q4_1.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            write_shape(staged, SHAPES[name])
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
    return target


def write_shape(path: Path, shape: Shape) -> None:
    """Random q4_1 matrices whose outputs have about the size of their inputs, so that all stays in range."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(40_960)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_vocab_size(shape.vocab)
    _add_text_part(writer, shape.vocab)
    embedding = _q8_0(random, shape.vocab, shape.hidden)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    query, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    matrices = {
        "attn_q": _q4_1(random, query, shape.hidden),
        "attn_k": _q4_1(random, kv, shape.hidden),
        "attn_v": _q4_1(random, kv, shape.hidden),
        "attn_output": _q4_1(random, shape.hidden, query),
        "ffn_gate": _q4_1(random, shape.ffn, shape.hidden),
        "ffn_up": _q4_1(random, shape.ffn, shape.hidden),
        "ffn_down": _q4_1(random, shape.hidden, shape.ffn),
    }
    norms = {
        "attn_norm": shape.hidden,
        "ffn_norm": shape.hidden,
        "attn_q_norm": shape.head_dim,
        "attn_k_norm": shape.head_dim,
    }
    for layer in range(shape.n_layers):
        for name, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
        for name, blocks in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_text_part(writer: gguf.GGUFWriter, vocab: int) -> None:
    """A byte-level tokenizer of letters and one merge, and made-up names for the rest."""
    tokens = [*(chr(code) for code in range(33, 127)), "ab"]
    tokens += [f"<{number}>" for number in range(len(tokens), vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(vocab - 1)
    writer.add_bos_token_id(vocab - 2)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def _q4_1(random: np.random.Generator, n_rows: int, n_cols: int) -> NDArray[np.uint8]:
    """Elements d * q - 7.5 d with q in 0..15, as rows of blocks: scale, minimum, 32 nibbles."""
    d = np.float16(1 / (4.61 * np.sqrt(n_cols)))  # 4.61: the standard deviation of 0..15
    head = np.array([d, np.float16(-7.5) * d], np.float16).view(np.uint8)
    return _blocks(random, head, n_rows, n_cols // 32, 16)


def _q8_0(random: np.random.Generator, n_rows: int, n_cols: int) -> NDArray[np.uint8]:
    """Elements d * q with q in -128..127."""
    head = np.array([1 / 74], np.float16).view(np.uint8)  # 74: the standard deviation of -128..127
    return _blocks(random, head, n_rows, n_cols // 32, 32)


def _blocks(
    random: np.random.Generator, head: NDArray[np.uint8], n_rows: int, n_blocks: int, n_bytes: int
) -> NDArray[np.uint8]:
    blocks = np.empty((n_rows, n_blocks, len(head) + n_bytes), np.uint8)
    blocks[..., : len(head)] = head
    blocks[..., len(head) :] = random.integers(0, 256, (n_rows, n_blocks, n_bytes), np.uint8)
    return blocks.reshape(n_rows, -1)
