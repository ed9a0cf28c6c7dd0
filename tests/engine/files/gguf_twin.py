"""A recorded checkpoint as the GGUF files a converter would make of it, by the format's own writer and name tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors
from numpy.typing import NDArray

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_vl": gguf.MODEL_ARCH.QWEN3VL,
    "qwen3_vl_moe": gguf.MODEL_ARCH.QWEN3VLMOE,
}
Arrays = dict[str, NDArray[np.float32]]


def load_f32(folder: Path) -> Arrays:
    """All weights as float32, by safetensors' own reader (bfloat16 by its upper half)."""
    weights: Arrays = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            body = tensor["data"]
            if tensor["dtype"] == "BF16":
                array = (np.frombuffer(body, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
            else:
                array = np.frombuffer(body, np.float32)
            weights[name] = array.reshape(tensor["shape"])
    return weights


def write_twin(folder: Path, target: Path, kind: str = "f32") -> Path:
    """Write ``target`` (and an mmproj file beside it for a model that sees). ``kind`` is that of matrices."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    _write_text_facts(writer, config, text)
    end_ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    writer.add_eos_token_id(end_ids[0])
    writer.add_eot_token_id(end_ids[1])
    names = gguf.get_tensor_name_map(architecture, text["num_hidden_layers"])
    dense_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, text["num_hidden_layers"])
    weights = load_f32(folder)
    for name, array in _text_weights(config, text, weights).items():
        ends = (".weight", ".bias")
        theirs = names.get_name(name, try_suffixes=ends) or dense_names.get_name(name, try_suffixes=ends)
        assert theirs is not None, name
        _add(writer, theirs, array, kind)
    if "vision_config" in config:
        writer.add_array("tokenizer.ggml.tokens", _tokens(config, text["vocab_size"]))
        _write_mmproj(config, weights, target.with_name(f"mmproj-{target.name}"))
    _finish(writer)
    return target


def _write_text_facts(writer: Any, config: dict[str, Any], text: dict[str, Any]) -> None:
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(text["rope_theta"])
    if "head_dim" in text:
        writer.add_key_length(text["head_dim"])
        writer.add_value_length(text["head_dim"])
    if "num_experts" in text:
        writer.add_expert_count(text["num_experts"])
        writer.add_expert_used_count(text["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
        if not text["norm_topk_prob"]:
            writer.add_expert_weights_norm(False)
    if "vision_config" in config:
        writer.add_rope_dimension_sections([*text["rope_scaling"]["mrope_section"], 0])
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))


def _text_weights(config: dict[str, Any], text: dict[str, Any], weights: Arrays) -> Arrays:
    """As a converter has them: experts stacked [expert, out, in], a llama's q and k rows as rope pairs."""
    found = {
        name.replace("model.language_model.", "model."): array
        for name, array in weights.items()
        if not name.startswith("model.visual.") and ".mlp.experts." not in name
    }
    for i in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        found |= _experts(prefix, text, weights)
        if config["model_type"] == "llama":
            for name, n_heads in (("q", text["num_attention_heads"]), ("k", text["num_key_value_heads"])):
                key = f"{prefix}self_attn.{name}_proj.weight"
                halves = found[key].reshape(n_heads, 2, -1, found[key].shape[1])
                found[key] = halves.swapaxes(1, 2).reshape(found[key].shape)
    return found


def _experts(prefix: str, text: dict[str, Any], weights: Arrays) -> Arrays:
    fused = prefix.replace("model.", "model.language_model.") + "mlp.experts."
    if f"{fused}gate_up_proj" in weights:
        both, down = weights[f"{fused}gate_up_proj"].swapaxes(1, 2), weights[f"{fused}down_proj"].swapaxes(1, 2)
        parts = {"gate": both[:, : both.shape[1] // 2], "up": both[:, both.shape[1] // 2 :], "down": down}
    elif f"{prefix}mlp.experts.0.up_proj.weight" in weights:
        parts = {
            part: np.stack([weights[f"{prefix}mlp.experts.{e}.{part}_proj.weight"] for e in range(text["num_experts"])])
            for part in ("gate", "up", "down")
        }
    else:
        return {}
    return {f"{prefix}mlp.experts.{part}_proj.weight": np.ascontiguousarray(array) for part, array in parts.items()}


def _tokens(config: dict[str, Any], vocab_size: int) -> list[str]:
    tokens = [f"t{i}" for i in range(vocab_size)]
    for key, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        tokens[config[key]] = token
    return tokens


def _write_mmproj(config: dict[str, Any], weights: Arrays, target: Path) -> None:
    vision = config["vision_config"]
    writer = gguf.GGUFWriter(target, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_use_gelu(True)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_image_size(int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_projection_dim(vision["out_hidden_size"])
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_is_deepstack_layers([i in vision["deepstack_visual_indexes"] for i in range(vision["depth"])])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    for name, array in weights.items():
        if not name.startswith("model.visual."):
            continue
        visual, suffix = name.removeprefix("model."), name.rpartition(".")[2]
        if name.endswith("patch_embed.proj.weight"):
            for frame in range(vision["temporal_patch_size"]):
                end = ".weight" if frame == 0 else f".weight.{frame}"
                _add(writer, f"v.patch_embd{end}", np.ascontiguousarray(array[:, :, frame]), "f32")
        elif ".deepstack_merger_list." in name:
            _, _, index, part, _ = visual.split(".")
            layer = vision["deepstack_visual_indexes"][int(index)]
            theirs = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[part]
            _add(writer, f"v.deepstack.{layer}.{theirs}.{suffix}", array, "f32")
        elif ".merger." in name:
            theirs = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[visual.split(".")[2]]
            _add(writer, f"{theirs}.{suffix}", array, "f32")
        else:
            mapped = names.get_name(visual, try_suffixes=(".weight", ".bias"))
            assert mapped is not None, name
            _add(writer, mapped, array, "f32")
    _finish(writer)


def _add(writer: Any, name: str, array: NDArray[np.float32], kind: str) -> None:
    if kind == "f32" or array.ndim == 1:
        writer.add_tensor(name, array)
    else:
        library_kind = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(name, gguf.quants.quantize(array, library_kind), raw_dtype=library_kind)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
