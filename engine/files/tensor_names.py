"""The engine's own names of a model's tensors, their shapes, and what checkpoints and GGUF files call them.

embedding, output_norm, head                     head only where it is not tied to the embedding
layers.I.attn_norm, attn_q, attn_k, attn_v, attn_o, ffn_norm
layers.I.attn_q_bias, attn_k_bias, attn_v_bias   with qkv_bias
layers.I.attn_q_norm, attn_k_norm                with qk_norm
layers.I.ffn_gate, ffn_up, ffn_down              dense layers
layers.I.router, experts.E.gate, .up, .down      sparse layers
vision.patch, vision.patch_bias, vision.positions
vision.blocks.I.norm1, qkv, out, norm2, fc1, fc2            each with a _bias beside it
vision.merger.norm, fc1, fc2; vision.deepstack.J.the same   each with a _bias beside it
"""

from __future__ import annotations

from typing import Final

from kvferry.engine.config import ModelConfig, VisionConfig

Shapes = dict[str, tuple[int, int]]

_CHECKPOINT_LAYER: Final = {
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_o": "self_attn.o_proj.weight",
    "attn_q_bias": "self_attn.q_proj.bias",
    "attn_k_bias": "self_attn.k_proj.bias",
    "attn_v_bias": "self_attn.v_proj.bias",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
}
_GGUF_LAYER: Final = {
    "attn_norm": "attn_norm.weight",
    "attn_q": "attn_q.weight",
    "attn_k": "attn_k.weight",
    "attn_v": "attn_v.weight",
    "attn_o": "attn_output.weight",
    "attn_q_bias": "attn_q.bias",
    "attn_k_bias": "attn_k.bias",
    "attn_v_bias": "attn_v.bias",
    "attn_q_norm": "attn_q_norm.weight",
    "attn_k_norm": "attn_k_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "ffn_gate": "ffn_gate.weight",
    "ffn_up": "ffn_up.weight",
    "ffn_down": "ffn_down.weight",
    "router": "ffn_gate_inp.weight",
}
_CHECKPOINT_BLOCK: Final = {
    "norm1": "norm1",
    "qkv": "attn.qkv",
    "out": "attn.proj",
    "norm2": "norm2",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
_GGUF_BLOCK: Final = {
    "norm1": "ln1",
    "qkv": "attn_qkv",
    "out": "attn_out",
    "norm2": "ln2",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}
_CHECKPOINT_MERGER: Final = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_GGUF_MERGER: Final = {"norm": "v.post_ln", "fc1": "mm.0", "fc2": "mm.2"}


def model_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the model without its vision tower: name to (rows, cols)."""
    hidden = config.hidden_size
    shapes: Shapes = {"embedding": (config.vocab_size, hidden), "output_norm": (1, hidden)}
    if not config.tied_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    for i in range(config.n_layers):
        shapes |= {
            f"layers.{i}.{name}": shape for name, shape in _layer_shapes(config, sparse=config.is_sparse(i)).items()
        }
    return shapes


def _layer_shapes(config: ModelConfig, *, sparse: bool) -> Shapes:
    hidden, query, kv = config.hidden_size, config.query_dim, config.kv_dim
    shapes: Shapes = {
        "attn_norm": (1, hidden),
        "attn_q": (query, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_o": (hidden, query),
        "ffn_norm": (1, hidden),
    }
    if config.qkv_bias:
        shapes |= {"attn_q_bias": (1, query), "attn_k_bias": (1, kv), "attn_v_bias": (1, kv)}
    if config.qk_norm:
        shapes |= {"attn_q_norm": (1, config.head_dim), "attn_k_norm": (1, config.head_dim)}
    if sparse and config.moe is not None:
        shapes["router"] = (config.moe.n_experts, hidden)
        for e in range(config.moe.n_experts):
            shapes |= {f"experts.{e}.{part}": shape for part, shape in _gated(hidden, config.moe.ffn_size).items()}
    else:
        shapes |= {f"ffn_{part}": shape for part, shape in _gated(hidden, config.ffn_size).items()}
    return shapes


def _gated(hidden: int, ffn: int) -> Shapes:
    return {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}


def vision_shapes(vision: VisionConfig, hidden_size: int) -> Shapes:
    """Every tensor of a vision tower whose image tokens have ``hidden_size`` elements."""
    size, merged = vision.hidden_size, vision.hidden_size * vision.merge_size**2
    shapes: Shapes = {
        "vision.patch": (size, vision.patch_elements),
        "vision.patch_bias": (1, size),
        "vision.positions": (vision.grid_side**2, size),
    }
    block: Shapes = {
        "norm1": (1, size),
        "qkv": (3 * size, size),
        "out": (size, size),
        "norm2": (1, size),
        "fc1": (vision.ffn_size, size),
        "fc2": (size, vision.ffn_size),
    }
    for i in range(vision.n_layers):
        shapes |= _with_biases(f"vision.blocks.{i}.", block)
    linear: Shapes = {"fc1": (merged, merged), "fc2": (hidden_size, merged)}
    shapes |= _with_biases("vision.merger.", {"norm": (1, size), **linear})
    for j in range(len(vision.deepstack_layers)):
        shapes |= _with_biases(f"vision.deepstack.{j}.", {"norm": (1, merged), **linear})
    return shapes


def _with_biases(prefix: str, weights: Shapes) -> Shapes:
    """Each weight, and its bias: one number for each row; a norm's has the weight's own shape."""
    shapes: Shapes = {}
    for name, (rows, cols) in weights.items():
        shapes[prefix + name] = (rows, cols)
        shapes[f"{prefix}{name}_bias"] = (1, cols if rows == 1 else rows)
    return shapes


def checkpoint_name(name: str, config: ModelConfig) -> str:
    """What a checkpoint calls a tensor; an expert's by the name it has where each expert is a tensor of its own."""
    if name.startswith("vision."):
        return _checkpoint_vision_name(name.removeprefix("vision."))
    root = "model.language_model." if config.vision is not None else "model."
    whole = {"embedding": root + "embed_tokens.weight", "output_norm": root + "norm.weight", "head": "lm_head.weight"}
    if name in whole:
        return whole[name]
    _, layer, part = name.split(".", 2)
    if part.startswith("experts."):
        _, expert, matrix = part.split(".")
        return f"{root}layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
    return f"{root}layers.{layer}.{_CHECKPOINT_LAYER[part]}"


def fused_experts_names(layer: int, config: ModelConfig) -> tuple[str, str]:
    """What a checkpoint calls a layer's experts where they are fused: gate and up together, and down."""
    root = "model.language_model." if config.vision is not None else "model."
    prefix = f"{root}layers.{layer}.mlp.experts."
    return f"{prefix}gate_up_proj", f"{prefix}down_proj"


def _checkpoint_vision_name(name: str) -> str:
    whole = {"patch": "patch_embed.proj.weight", "patch_bias": "patch_embed.proj.bias", "positions": "pos_embed.weight"}
    if name in whole:
        return f"model.visual.{whole[name]}"
    group, *index, part = name.split(".")
    table = _CHECKPOINT_BLOCK if group == "blocks" else _CHECKPOINT_MERGER
    folder = {"blocks": "blocks", "merger": "merger", "deepstack": "deepstack_merger_list"}[group]
    return ".".join(["model.visual", folder, *index, _weight_or_bias(table, part)])


def gguf_name(name: str) -> str:
    """What a GGUF file calls a tensor of the model; of an expert, the tensor that holds all experts' part."""
    whole = {"embedding": "token_embd.weight", "output_norm": "output_norm.weight", "head": "output.weight"}
    if name in whole:
        return whole[name]
    _, layer, part = name.split(".", 2)
    if part.startswith("experts."):
        return f"blk.{layer}.ffn_{part.rpartition('.')[2]}_exps.weight"
    return f"blk.{layer}.{_GGUF_LAYER[part]}"


def gguf_vision_name(name: str, vision: VisionConfig) -> str:
    """What an mmproj file calls a tensor of the vision tower; of the patch embedding, the first frame's."""
    name = name.removeprefix("vision.")
    whole = {"patch": "v.patch_embd.weight", "patch_bias": "v.patch_embd.bias", "positions": "v.position_embd.weight"}
    if name in whole:
        return whole[name]
    group, *index, part = name.split(".")
    if group == "blocks":
        return f"v.blk.{index[0]}.{_weight_or_bias(_GGUF_BLOCK, part)}"
    if group == "merger":
        return _weight_or_bias(_GGUF_MERGER, part)
    same = {"norm": "norm", "fc1": "fc1", "fc2": "fc2"}
    return f"v.deepstack.{vision.deepstack_layers[int(index[0])]}.{_weight_or_bias(same, part)}"


def _weight_or_bias(table: dict[str, str], part: str) -> str:
    if part.endswith("_bias"):
        return table[part.removesuffix("_bias")] + ".bias"
    return table[part] + ".weight"
