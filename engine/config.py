"""A model's shape: the numbers every other part of the engine is built from."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final

from kvferry.engine.errors import ModelInvalid

N_LAYERS_MAX: Final = 1024
N_CHANNELS: Final = 3  # of an image: red, green, blue

# Bounds for figures read from a file, so that a damaged one is refused before anything is allocated from it. Each is
# several times what the largest published model has.
_LIMITS: Final[dict[str, int]] = {
    "n_layers": N_LAYERS_MAX,
    "hidden_size": 1 << 17,
    "n_heads": 1024,
    "n_kv_heads": 1024,
    "head_dim": 1024,
    "ffn_size": 1 << 19,
    "vocab_size": 1 << 22,
    "context_length": 1 << 26,
}
_MOE_LIMITS: Final[dict[str, int]] = {"n_experts": 1 << 12, "n_active": 1 << 12, "ffn_size": 1 << 19}
_VISION_LIMITS: Final[dict[str, int]] = {
    "n_layers": N_LAYERS_MAX,
    "hidden_size": 1 << 16,
    "n_heads": 1024,
    "ffn_size": 1 << 18,
    "patch_size": 256,
    "temporal_patch_size": 16,
    "merge_size": 16,
    "grid_side": 1024,
}
_PIXELS_MAX: Final = 1 << 28  # 16 times the largest limit a published preprocessor states


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Layers whose feed-forward part is a choice of experts.

    A router scores all ``n_experts``; each token goes through the ``n_active`` best, each a gated feed-forward part of
    ``ffn_size``. ``normalise``: whether the chosen ones' probabilities are divided by their sum. ``dense_layers`` have
    an ordinary feed-forward part.
    """

    n_experts: int
    n_active: int
    ffn_size: int
    normalise: bool
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_limits("mixture's", self, _MOE_LIMITS)
        if self.n_active > self.n_experts:
            raise ModelInvalid(f"the model chooses {self.n_active} experts of only {self.n_experts}")

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.dense_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """How an image becomes patches: pixel counts it is scaled into, then (value / 255 - mean) / std per channel."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if not 1 <= self.min_pixels <= self.max_pixels <= _PIXELS_MAX:
            raise ModelInvalid(
                f"images of {self.min_pixels} to {self.max_pixels} pixels: the limits must be in order, "
                f"between 1 and {_PIXELS_MAX}"
            )
        if not all(math.isfinite(x) for x in self.mean) or not all(math.isfinite(x) and x > 0 for x in self.std):
            raise ModelInvalid(f"image mean {self.mean} and std {self.std} must be finite, and std above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision tower: a transformer over patches of ``patch_size`` squared pixels (and ``temporal_patch_size`` frames).

    ``grid_side``: learned position embeddings form a square grid of this side, interpolated to the image's own.
    ``merge_size`` squared neighbouring patches become one image token. After tower layer ``deepstack_layers[j]`` a
    merger of its own makes features that are added to the image's rows after text layer j.
    """

    n_layers: int
    hidden_size: int
    n_heads: int
    ffn_size: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    grid_side: int
    deepstack_layers: tuple[int, ...]
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    image: ImageConfig
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        _check_limits("vision tower's", self, _VISION_LIMITS)
        if self.hidden_size % (4 * self.n_heads):
            raise ModelInvalid(
                f"the vision tower's {self.n_heads} heads must divide its hidden size {self.hidden_size} "
                "into multiples of 4"
            )
        if any(not 0 <= layer < self.n_layers for layer in self.deepstack_layers):
            raise ModelInvalid(
                f"deepstack layers {self.deepstack_layers} lie outside a vision tower of {self.n_layers} layers"
            )
        _check_positive("vision tower's", self, ("norm_eps", "rope_theta"))

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads

    @property
    def patch_elements(self) -> int:
        """Elements of one patch as the tower reads it: channel, frame, row, column."""
        return N_CHANNELS * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model. Sizes are counts of elements; ids are token ids.

    ``rope_adjacent_pairs`` says how the q and k rows lie in the file: True when rope turns elements (2i, 2i+1), as in
    GGUF files of architecture llama, whose rows were permuted on conversion; False when it turns (i, i + head_dim/2).
    ``ffn_size`` is that of dense layers. ``mrope_section``: how many of the head_dim/2 frequencies turn by a token's
    time, row and column (interleaved); None when all turn by its position. ``rope_divisors``: float32 values that the
    frequencies are divided by, ``rope_magnitude``: what cosines and sines are multiplied by (rope_scaling.py).

    Raises ModelInvalid when the figures contradict each other or are out of all proportion.
    """

    architecture: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    rope_adjacent_pairs: bool
    end_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    mrope_section: tuple[int, int, int] | None = None
    rope_divisors: tuple[float, ...] | None = None
    rope_magnitude: float = 1.0
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _check_limits("model's", self, _LIMITS)
        if self.n_heads % self.n_kv_heads:
            raise ModelInvalid(
                f"the model has {self.n_heads} heads and {self.n_kv_heads} KV heads; "
                "the former must be a multiple of the latter"
            )
        if self.head_dim % 2:
            raise ModelInvalid(f"the model's head_dim is {self.head_dim}; rope turns pairs, so it must be even")
        _check_positive("model's", self, ("rope_theta", "rms_eps", "rope_magnitude"))
        for token_id in self.end_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelInvalid(f"end token {token_id} lies outside the vocabulary of {self.vocab_size}")
        self._check_mrope()
        self._check_rope_divisors()
        if self.vision is not None:
            self._check_vision(self.vision)

    @property
    def kv_dim(self) -> int:
        """Elements of one K (or V) row: all KV heads, head-major."""
        return self.n_kv_heads * self.head_dim

    @property
    def query_dim(self) -> int:
        """Elements of all query heads of one token; need not be the hidden size."""
        return self.n_heads * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a choice of experts."""
        return self.moe is not None and self.moe.is_sparse(layer)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, as JSON can hold them; the order is the order of declaration.

        A field with a default appears only where the model uses it, so that a field added for one architecture leaves
        the fingerprints of the others as they are.
        """
        return _as_dict(self)

    def _check_mrope(self) -> None:
        section = self.mrope_section
        if section is not None and (min(section) < 0 or sum(section) != self.head_dim // 2):
            raise ModelInvalid(
                f"the model's mrope_section {section} must share out the {self.head_dim // 2} frequencies of a head"
            )

    def _check_rope_divisors(self) -> None:
        divisors = self.rope_divisors
        if divisors is None:
            return
        if len(divisors) != self.head_dim // 2 or not all(math.isfinite(x) and x > 0 for x in divisors):
            raise ModelInvalid(
                f"the model's {len(divisors)} rope divisors must be finite, above 0, and one for each of the "
                f"{self.head_dim // 2} frequencies of a head"
            )

    def _check_vision(self, vision: VisionConfig) -> None:
        if self.mrope_section is None:
            raise ModelInvalid("the model has a vision tower and no mrope_section, so image tokens have no position")
        if len(vision.deepstack_layers) > self.n_layers:
            raise ModelInvalid(
                f"{len(vision.deepstack_layers)} deepstack features cannot be added to {self.n_layers} layers"
            )
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            token_id = getattr(vision, name)
            if not 0 <= token_id < self.vocab_size:
                raise ModelInvalid(f"{name} {token_id} lies outside the vocabulary of {self.vocab_size}")


def _check_limits(whose: str, config: object, limits: dict[str, int]) -> None:
    for name, limit in limits.items():
        value = getattr(config, name)
        if not 1 <= value <= limit:
            raise ModelInvalid(f"the {whose} {name} is {value}; it must lie between 1 and {limit}")


def _check_positive(whose: str, config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise ModelInvalid(f"the {whose} {name} is {value}; it must be finite and above 0")


def _as_dict(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is MISSING or value != field.default:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, MoeConfig | ImageConfig | VisionConfig):
        return _as_dict(value)
    return list(value) if isinstance(value, tuple) else value
