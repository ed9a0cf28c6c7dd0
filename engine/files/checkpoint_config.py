"""A model's shape out of a checkpoint folder's config.json and its neighbours, in their older and newer spelling."""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import Any, Final

from kvferry.engine.architectures.base import Architecture
from kvferry.engine.architectures.registry import by_model_type
from kvferry.engine.config import N_CHANNELS, N_LAYERS_MAX, ImageConfig, ModelConfig, MoeConfig, VisionConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.fields import Fields, read_json, read_json_if_there
from kvferry.engine.rope_scaling import Divisors, linear_divisors, llama3_divisors, yarn_divisors, yarn_magnitude

# What the published Qwen3-VL preprocessors state; for folders that state nothing.
MIN_PIXELS: Final = 65_536
MAX_PIXELS: Final = 16_777_216
SCALED: Final = ("linear", "llama3", "yarn")
FACTOR_MAX: Final = 1024
HEAD_DIM_MAX: Final = 1024
_MROPE_SECTION: Final = (24, 20, 20)
_HALF: Final = (0.5, 0.5, 0.5)


def read_checkpoint_config(folder: Path) -> ModelConfig:
    """The shape that config.json states.

    Raises UnsupportedArchitecture for an architecture or a feature that is not supported, ModelInvalid for figures that
    are missing, of a wrong type, or in contradiction to each other.
    """
    path = folder / "config.json"
    whole = Fields(path, read_json(path))
    architecture = by_model_type(path, whole.text("model_type"))
    text = whole.part("text_config") if architecture.vision else whole
    _refuse_what_is_not_supported(text, architecture)
    rope = _Rope(text)
    try:
        head_dim, theta = _head_dim(text, architecture), rope.theta(architecture)
        divisors, magnitude = rope.scaling(head_dim, theta)
        return ModelConfig(
            architecture=architecture.name,
            n_layers=text.integer("num_hidden_layers"),
            hidden_size=text.integer("hidden_size"),
            n_heads=text.integer("num_attention_heads"),
            n_kv_heads=_n_kv_heads(text, architecture),
            head_dim=head_dim,
            ffn_size=text.integer("intermediate_size"),
            vocab_size=text.integer("vocab_size"),
            context_length=text.integer("max_position_embeddings"),
            rope_theta=theta,
            rope_divisors=divisors,
            rope_magnitude=magnitude,
            rms_eps=text.number("rms_norm_eps"),
            tied_embeddings=whole.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
            rope_adjacent_pairs=False,
            end_token_ids=stated_end_token_ids(folder) or (),
            qkv_bias=architecture.qkv_bias,
            qk_norm=architecture.qk_norm,
            moe=_moe(text, architecture) if architecture.sparse else None,
            mrope_section=rope.section() if architecture.vision else None,
            vision=_vision(folder, whole, text) if architecture.vision else None,
        )
    except ModelInvalid as error:
        raise error if str(path) in str(error) else ModelInvalid(f"{path}: {error}") from error


def stated_end_token_ids(folder: Path) -> tuple[int, ...] | None:
    """The tokens that end an answer: generation_config.json is the authority, then config.json. None: neither says."""
    config = read_json_if_there(folder / "config.json")
    nested = config.get("text_config")
    sources: list[dict[str, Any]] = [read_json_if_there(folder / "generation_config.json"), config]
    if isinstance(nested, dict):
        sources.append(nested)
    for source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and all(type(token_id) is int for token_id in ids):
            return tuple(dict.fromkeys(ids))
    return None


def check_scaling(where: object, head_dim: int, theta: float, factor: float, original_context: int) -> None:
    """Raises ModelInvalid for figures of a scaled rope that cannot be."""
    if not (1 <= factor <= FACTOR_MAX and theta > 1 and original_context >= 1 and 2 <= head_dim <= HEAD_DIM_MAX):
        raise ModelInvalid(
            f"{where}: rope scaled by {factor} from {original_context} positions, with base {theta} and heads of "
            f"{head_dim}, cannot be: the factor must lie between 1 and {FACTOR_MAX}, the base above 1"
        )


class _Rope:
    """Rope's figures: beside the others with ``rope_scaling``, or together in the newer ``rope_parameters``."""

    def __init__(self, text: Fields) -> None:
        self._text = text
        self._parameters = text.part("rope_parameters" if "rope_parameters" in text else "rope_scaling")
        kind = self._parameters.text("rope_type", self._parameters.text("type", "default"))
        if kind not in {"default", "mrope", *SCALED}:
            raise UnsupportedArchitecture(
                f"{text.where}: rope scaling {kind!r} is not supported; supported are {', '.join(SCALED)}"
            )
        self._kind = kind
        partial = text.number("partial_rotary_factor", self._parameters.number("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise UnsupportedArchitecture(f"{text.where}: rope over a part of a head ({partial}) is not supported")

    def theta(self, architecture: Architecture) -> float:
        old_llama = 10_000.0 if architecture.name == "llama" else None  # from before it was a figure
        if "rope_theta" in self._parameters:
            return self._parameters.number("rope_theta")
        return self._text.number("rope_theta", old_llama)

    def scaling(self, head_dim: int, theta: float) -> tuple[Divisors | None, float]:
        """What frequencies are divided by, and what cosines and sines are multiplied by."""
        if self._kind not in SCALED:
            return None, 1.0
        p = self._parameters
        factor = p.number("factor")
        original = p.integer("original_max_position_embeddings", self._text.integer("max_position_embeddings"))
        check_scaling(p.where, head_dim, theta, factor, original)
        if self._kind == "linear":
            return linear_divisors(head_dim, factor), 1.0
        if self._kind == "llama3":
            low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
            if not 0 < low < high:
                raise ModelInvalid(f"{p.where}: rope's low_freq_factor {low} must lie between 0 and {high}")
            return llama3_divisors(head_dim, theta, factor=factor, low=low, high=high, original_context=original), 1.0
        if "mscale" in p or "mscale_all_dim" in p or not p.flag("truncate", True):
            raise UnsupportedArchitecture(f"{p.where}: yarn with mscale, or without truncate, is not supported")
        fast, slow = p.number("beta_fast", 32.0), p.number("beta_slow", 1.0)
        if not 0 < slow < fast:
            raise ModelInvalid(f"{p.where}: rope's beta_slow {slow} must lie between 0 and beta_fast {fast}")
        divisors = yarn_divisors(head_dim, theta, factor=factor, fast=fast, slow=slow, original_context=original)
        return divisors, p.number("attention_factor", yarn_magnitude(factor))

    def section(self) -> tuple[int, int, int]:
        section = self._parameters.integers("mrope_section", _MROPE_SECTION)
        if len(section) != 3:
            raise ModelInvalid(f"{self._text.where}: 'mrope_section' has {len(section)} parts, expected 3")
        if not self._parameters.flag("mrope_interleaved", True):
            raise UnsupportedArchitecture(f"{self._text.where}: mrope that is not interleaved is not supported")
        return section[0], section[1], section[2]


def _refuse_what_is_not_supported(text: Fields, architecture: Architecture) -> None:
    def refuse(what: str) -> None:
        raise UnsupportedArchitecture(f"{text.where}: {what} is not supported for {architecture.name}")

    if (activation := text.text("hidden_act", "silu")) != "silu":
        refuse(f"activation {activation!r}")
    if text.flag("use_sliding_window", False):
        refuse("attention over a sliding window")
    layer_types = text.values.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        refuse("a layer that is not full attention")
    for name in ("attention_bias", "mlp_bias"):
        if text.flag(name, False):
            refuse(f"{name} = true")


def _n_kv_heads(text: Fields, architecture: Architecture) -> int:
    if architecture.explicit_head_dim or "num_key_value_heads" in text:
        return text.integer("num_key_value_heads")
    return text.integer("num_attention_heads")


def _head_dim(text: Fields, architecture: Architecture) -> int:
    if architecture.explicit_head_dim or "head_dim" in text:
        return text.integer("head_dim")
    hidden, n_heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    if n_heads < 1 or hidden % n_heads:
        raise ModelInvalid(f"{text.where}: {n_heads} heads do not divide the hidden size {hidden}")
    return hidden // n_heads


def _moe(text: Fields, architecture: Architecture) -> MoeConfig:
    n_layers, step = text.integer("num_hidden_layers"), text.integer("decoder_sparse_step", 1)
    listed = text.integers("mlp_only_layers", ())
    if step < 1 or any(not 0 <= layer < n_layers for layer in listed):
        raise ModelInvalid(
            f"{text.where}: 'mlp_only_layers' {list(listed)} and 'decoder_sparse_step' {step} "
            f"do not fit {n_layers} layers"
        )
    layers = range(min(n_layers, N_LAYERS_MAX))
    normalise = architecture.normalises_top_k
    return MoeConfig(
        n_experts=text.integer("num_experts"),
        n_active=text.integer("num_experts_per_tok"),
        ffn_size=text.integer("moe_intermediate_size"),
        normalise=text.flag("norm_topk_prob", False) if normalise is None else normalise,
        dense_layers=tuple(i for i in layers if i in listed or (i + 1) % step),
    )


def _vision(folder: Path, whole: Fields, text: Fields) -> VisionConfig:
    vision = whole.part("vision_config")
    if (activation := vision.text("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise UnsupportedArchitecture(f"{whole.where}: activation {activation!r} of the vision tower is not supported")
    if (n_channels := vision.integer("in_channels", N_CHANNELS)) != N_CHANNELS:
        raise UnsupportedArchitecture(f"{whole.where}: images of {n_channels} channels are not supported")
    if vision.integer("out_hidden_size") != text.integer("hidden_size"):
        raise ModelInvalid(
            f"{whole.where}: the vision tower makes rows of {vision.integer('out_hidden_size')} elements "
            f"and the model has {text.integer('hidden_size')}"
        )
    return VisionConfig(
        n_layers=vision.integer("depth"),
        hidden_size=vision.integer("hidden_size"),
        n_heads=vision.integer("num_heads"),
        ffn_size=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size"),
        temporal_patch_size=vision.integer("temporal_patch_size"),
        merge_size=vision.integer("spatial_merge_size"),
        grid_side=square_side(whole.where, vision.integer("num_position_embeddings")),
        deepstack_layers=vision.integers("deepstack_visual_indexes"),
        image_token_id=whole.integer("image_token_id"),
        video_token_id=whole.integer("video_token_id"),
        vision_start_token_id=whole.integer("vision_start_token_id"),
        vision_end_token_id=whole.integer("vision_end_token_id"),
        image=_image(folder),
    )


def _image(folder: Path) -> ImageConfig:
    path = folder / "preprocessor_config.json"
    stated = Fields(path, read_json_if_there(path))
    if not stated.values:
        path = folder / "processor_config.json"
        stated = Fields(path, read_json_if_there(path)).part("image_processor")
    size = stated.part("size")
    return ImageConfig(
        min_pixels=size.integer("shortest_edge", stated.integer("min_pixels", MIN_PIXELS)),
        max_pixels=size.integer("longest_edge", stated.integer("max_pixels", MAX_PIXELS)),
        mean=three_numbers(stated, "image_mean"),
        std=three_numbers(stated, "image_std"),
    )


def square_side(where: object, n_positions: int) -> int:
    """The side of a square grid of positions. Raises ModelInvalid when it is none."""
    side = isqrt(max(n_positions, 0))
    if side * side != n_positions:
        raise ModelInvalid(f"{where}: {n_positions} position embeddings do not form a square grid")
    return side


def three_numbers(fields: Fields, key: str) -> tuple[float, float, float]:
    """One figure for each colour; one half when none is stated. Raises ModelInvalid."""
    values = fields.numbers(key, _HALF)
    if len(values) != 3:
        raise ModelInvalid(f"{fields.where}: {key!r} has {len(values)} numbers, expected 3")
    return values[0], values[1], values[2]
