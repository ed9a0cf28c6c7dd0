"""A decoder's shape: the numbers every other part of the engine is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from kvferry.engine.errors import ModelInvalid

SUPPORTED_ARCHITECTURES: Final = ("llama",)

# Bounds for figures read from a file, so that a damaged one is refused before anything is allocated from it. Each is
# several times what the largest published dense model has.
_LIMITS: Final[dict[str, int]] = {
    "n_layers": 1024,
    "hidden_size": 1 << 17,
    "n_heads": 1024,
    "n_kv_heads": 1024,
    "head_dim": 1024,
    "ffn_size": 1 << 19,
    "vocab_size": 1 << 22,
    "context_length": 1 << 26,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model. Sizes are counts of elements; ids are token ids.

    ``rope_adjacent_pairs`` says how the q and k rows lie in the file: True when rope turns elements (2i, 2i+1), as in
    GGUF files of architecture llama, whose rows were permuted on conversion; False when it turns (i, i + head_dim/2).

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

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ModelInvalid(f"the model's {name} is {value}; it must lie between 1 and {limit}")
        if self.n_heads % self.n_kv_heads:
            raise ModelInvalid(
                f"the model has {self.n_heads} heads and {self.n_kv_heads} KV heads; "
                "the former must be a multiple of the latter"
            )
        if self.head_dim % 2:
            raise ModelInvalid(f"the model's head_dim is {self.head_dim}; rope turns pairs, so it must be even")
        for name in ("rope_theta", "rms_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelInvalid(f"the model's {name} is {value}; it must be finite and above 0")
        for token_id in self.end_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelInvalid(f"end token {token_id} lies outside the vocabulary of {self.vocab_size}")

    @property
    def kv_dim(self) -> int:
        """Elements of one K (or V) row: all KV heads, head-major."""
        return self.n_kv_heads * self.head_dim

    def as_dict(self) -> dict[str, str | int | float | bool | list[int]]:
        """All fields by name, as JSON can hold them; the order is the order of declaration."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
