"""A checkpoint of the true shape of Qwen3-30B-A3B, cut to few layers, with random weights made on the fly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

HIDDEN, VOCAB, N_EXPERTS, EXPERT, HEAD_DIM, N_HEADS, N_KV_HEADS = 2048, 151_936, 128, 768, 128, 32, 4
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151_645,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "mlp_only_layers": [],
    "moe_intermediate_size": EXPERT,
    "norm_topk_prob": True,
    "num_attention_heads": N_HEADS,
    "num_experts": N_EXPERTS,
    "num_experts_per_tok": 8,
    "num_key_value_heads": N_KV_HEADS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
_STOCK = 1 << 24  # random weights that are made once; every tensor begins somewhere else in them


def write_checkpoint(folder: Path, n_layers: int) -> None:
    """bf16, a file of its own for each layer; written tensor by tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": n_layers}))
    normal = np.random.default_rng(5).standard_normal(_STOCK).astype(np.float32) / np.sqrt(np.float32(HIDDEN))
    stock = (normal.view(np.uint32) >> 16).astype("<u2")
    ones = np.full(HIDDEN, 0x3F80, "<u2")
    shapes = {"ends": {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}}
    shapes["ends"]["model.norm.weight"] = (HIDDEN,)
    for layer in range(n_layers):
        shapes[f"layer-{layer}"] = _layer(f"model.layers.{layer}.")
    weight_map = {}
    for name, tensors in shapes.items():
        weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
        _write(folder / f"{name}.safetensors", tensors, stock, ones)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _layer(prefix: str) -> dict[str, tuple[int, ...]]:
    query, kv = N_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}self_attn.q_norm.weight": (HEAD_DIM,),
        f"{prefix}self_attn.k_norm.weight": (HEAD_DIM,),
        f"{prefix}self_attn.q_proj.weight": (query, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (kv, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (kv, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, query),
        f"{prefix}mlp.gate.weight": (N_EXPERTS, HIDDEN),
    }
    for expert in range(N_EXPERTS):
        at = f"{prefix}mlp.experts.{expert}."
        shapes[f"{at}gate_proj.weight"] = shapes[f"{at}up_proj.weight"] = (EXPERT, HIDDEN)
        shapes[f"{at}down_proj.weight"] = (HIDDEN, EXPERT)
    return shapes


def _write(path: Path, shapes: dict[str, tuple[int, ...]], stock: np.ndarray, ones: np.ndarray) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        n_bytes = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for index, shape in enumerate(shapes.values()):
            n, at = int(np.prod(shape)), index * 1_000_003 % _STOCK
            if len(shape) == 1:
                out.write(ones[:n].tobytes())
                continue
            while n:
                part = stock[at : at + n]
                out.write(part.tobytes())
                n, at = n - len(part), 0
