"""A model's shape out of GGUF metadata, and a vision tower's out of its mmproj file."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Final

from kvferry.engine.architectures.base import Architecture
from kvferry.engine.architectures.registry import by_gguf_name
from kvferry.engine.config import N_LAYERS_MAX, ImageConfig, ModelConfig, MoeConfig, VisionConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.checkpoint_config import (
    MAX_PIXELS,
    MIN_PIXELS,
    check_scaling,
    square_side,
    three_numbers,
)
from kvferry.engine.files.fields import Fields
from kvferry.engine.rope_scaling import Divisors, linear_divisors, yarn_divisors, yarn_magnitude

_PROJECTOR: Final = "qwen3vl_merger"
_VISION_TOKENS: Final = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def read_gguf_config(
    path: Path,
    metadata: Mapping[str, Any],
    tensor_names: Container[str],
    vocab_size: int | None,
    rope_divisors: Divisors | None = None,
) -> ModelConfig:
    """The shape that a file's metadata states; without its vision tower, which is in another file.

    ``vocab_size``: rows of the embedding, None when there is none. ``rope_divisors``: the tensor of that purpose, which
    converters of Llama 3 models write. Raises UnsupportedArchitecture, ModelInvalid.
    """
    facts = _Facts(path, metadata)
    architecture = by_gguf_name(path, facts.whole.text("general.architecture"))
    if vocab_size is None:
        raise ModelInvalid(f"{path}: there is no tensor 'token_embd.weight', so it holds no model weights")
    hidden, n_heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    try:
        config = ModelConfig(
            architecture=architecture.name,
            n_layers=(n_layers := facts.integer("block_count")),
            hidden_size=hidden,
            n_heads=n_heads,
            n_kv_heads=facts.integer("attention.head_count_kv", n_heads),
            head_dim=(head_dim := facts.integer("attention.key_length", hidden // max(n_heads, 1))),
            ffn_size=_ffn_size(facts, architecture),
            vocab_size=vocab_size,
            context_length=facts.integer("context_length"),
            rope_theta=(theta := facts.number("rope.freq_base", 10_000.0)),
            rope_divisors=(scaling := _scaled_rope(facts, head_dim, theta, rope_divisors))[0],
            rope_magnitude=scaling[1],
            rms_eps=facts.number("attention.layer_norm_rms_epsilon"),
            tied_embeddings="output.weight" not in tensor_names,
            rope_adjacent_pairs=architecture.gguf_adjacent_pairs,
            end_token_ids=gguf_end_token_ids(path, metadata),
            qkv_bias=architecture.qkv_bias,
            qk_norm=architecture.qk_norm,
            moe=_moe(facts, architecture, n_layers, tensor_names) if architecture.sparse else None,
            mrope_section=_mrope_section(facts) if architecture.vision else None,
        )
    except ModelInvalid as error:
        raise error if str(path) in str(error) else ModelInvalid(f"{path}: {error}") from error
    _check_head_dim(facts, config)
    return config


def gguf_end_token_ids(path: Path, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, the file's end-of-sequence token first. Raises ModelInvalid."""
    whole = Fields(f"{path}: metadata", metadata)
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(whole.integer(key) for key in keys if key in whole))


def read_vision_config(path: Path, metadata: Mapping[str, Any], model_metadata: Mapping[str, Any]) -> VisionConfig:
    """The vision tower that an mmproj file's metadata states. ``model_metadata`` names the image tokens.

    Raises UnsupportedArchitecture, ModelInvalid.
    """
    whole = Fields(f"{path}: metadata", metadata)
    projector = whole.text("clip.vision.projector_type", whole.text("clip.projector_type", "none"))
    if projector != _PROJECTOR:
        raise UnsupportedArchitecture(f"{path}: projector {projector!r} is not supported; supported is {_PROJECTOR!r}")
    facts = Fields(whole.where, _with_prefix(metadata, "clip.vision."))
    patch_size = facts.integer("patch_size")
    side = facts.integer("image_size") // max(patch_size, 1)
    flags = facts.flags("is_deepstack_layers", ())
    try:
        return VisionConfig(
            n_layers=facts.integer("block_count"),
            hidden_size=facts.integer("embedding_length"),
            n_heads=facts.integer("attention.head_count"),
            ffn_size=facts.integer("feed_forward_length"),
            patch_size=patch_size,
            temporal_patch_size=2,
            merge_size=facts.integer("spatial_merge_size", 2),
            grid_side=square_side(path, side * side),
            deepstack_layers=tuple(layer for layer, is_one in enumerate(flags) if is_one),
            image=ImageConfig(
                min_pixels=facts.integer("image_min_pixels", MIN_PIXELS),
                max_pixels=facts.integer("image_max_pixels", MAX_PIXELS),
                mean=three_numbers(facts, "image_mean"),
                std=three_numbers(facts, "image_std"),
            ),
            norm_eps=facts.number("attention.layer_norm_epsilon", 1e-6),
            **_vision_token_ids(path, model_metadata),
        )
    except ModelInvalid as error:
        raise error if str(path) in str(error) else ModelInvalid(f"{path}: {error}") from error


class _Facts:
    """A file's metadata, and its keys under the architecture's own prefix."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.whole = Fields(f"{path}: metadata", metadata)
        self.prefix = self.whole.text("general.architecture") + "."

    def integer(self, key: str, default: int | None = None) -> int:
        return self.whole.integer(self.prefix + key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.whole.number(self.prefix + key, default)


def _scaled_rope(facts: _Facts, head_dim: int, theta: float, stored: Divisors | None) -> tuple[Divisors | None, float]:
    """What frequencies are divided by, and what cosines and sines are multiplied by."""
    kind = facts.whole.text(f"{facts.prefix}rope.scaling.type", "none")
    if kind == "none":
        return stored, 1.0
    if kind not in {"linear", "yarn"} or stored is not None:
        raise UnsupportedArchitecture(f"{facts.path}: rope scaling {kind!r} is not supported in a GGUF file")
    factor = facts.number("rope.scaling.factor")
    original = facts.integer("rope.scaling.original_context_length", facts.integer("context_length"))
    check_scaling(facts.path, head_dim, theta, factor, original)
    if kind == "linear":
        return linear_divisors(head_dim, factor), 1.0
    magnitude = facts.number("rope.scaling.attn_factor", 1.0) * yarn_magnitude(factor)
    return yarn_divisors(head_dim, theta, factor=factor, original_context=original), magnitude


def _check_head_dim(facts: _Facts, config: ModelConfig) -> None:
    rope_dims = facts.integer("rope.dimension_count", config.head_dim)
    value_dims = facts.integer("attention.value_length", config.head_dim)
    if rope_dims != config.head_dim or value_dims != config.head_dim:
        raise UnsupportedArchitecture(
            f"{facts.path}: heads of {config.head_dim} with rope over {rope_dims} and values of {value_dims} "
            "elements are not supported; all three must be equal"
        )


def _ffn_size(facts: _Facts, architecture: Architecture) -> int:
    """That of dense layers; a file whose layers are all sparse need not state it."""
    own = facts.integer("expert_feed_forward_length") if architecture.sparse else None
    return facts.integer("feed_forward_length", own)


def _moe(facts: _Facts, architecture: Architecture, n_layers: int, tensor_names: Container[str]) -> MoeConfig:
    """The metadata does not say which layers are dense; it is those without a router."""
    layers = range(min(n_layers, N_LAYERS_MAX))
    normalise = architecture.normalises_top_k
    return MoeConfig(
        n_experts=facts.integer("expert_count"),
        n_active=facts.integer("expert_used_count"),
        ffn_size=facts.integer("expert_feed_forward_length"),
        normalise=facts.whole.flag(f"{facts.prefix}expert_weights_norm", True) if normalise is None else normalise,
        dense_layers=tuple(i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in tensor_names),
    )


def _mrope_section(facts: _Facts) -> tuple[int, int, int]:
    section = facts.whole.integers(f"{facts.prefix}rope.dimension_sections")
    if len(section) not in {3, 4} or any(section[3:]):
        raise ModelInvalid(f"{facts.path}: rope.dimension_sections {list(section)} are not time, row and column")
    return section[0], section[1], section[2]


def _vision_token_ids(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    entries = tokens if isinstance(tokens, list) else []
    found: dict[str, Any] = {}
    for name, entry in _VISION_TOKENS.items():
        if entry not in entries:
            raise ModelInvalid(f"{path}: the model beside it has no token {entry!r}, so it takes no images")
        found[name] = entries.index(entry)
    return found


def _with_prefix(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
