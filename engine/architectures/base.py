"""What an architecture says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One kind of decoder; all have RMSNorm before each part, rope, grouped-query attention and a gated SiLU part.

    ``name``: ``model_type`` in a checkpoint's config.json, and ``ModelConfig.architecture``. ``gguf_name``:
    ``general.architecture`` of a GGUF file. ``gguf_adjacent_pairs``: its GGUF files hold q and k rows permuted for rope
    over adjacent elements. ``explicit_head_dim``: the head size is a figure of its own. ``normalises_top_k``: None when
    the config says it.
    """

    name: str
    gguf_name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    explicit_head_dim: bool = False
    sparse: bool = False
    normalises_top_k: bool | None = None
    vision: bool = False
    gguf_adjacent_pairs: bool = False
