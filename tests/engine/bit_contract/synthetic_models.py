"""Small made-up models of every architecture: what a layer may have, at sizes that fill no tile evenly.

All numbers are integers of a counter-based generator, scaled by powers of two and square roots: no logarithm or
exponential of a library, so the weights are the same on every processor.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from kvferry.engine.config import ImageConfig, ModelConfig, MoeConfig, VisionConfig
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.files.tensor_names import model_shapes, vision_shapes
from kvferry.engine.files.tensors import StoredRows
from kvferry.engine.packing import PackedModel, Quant, pack_model

_spec: Any = importlib.util.spec_from_file_location("gguf_blocks", Path(__file__).parents[1] / "gguf_blocks.py")
gguf_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gguf_blocks)

CONTEXT: Final = 1024
IMAGE_TOKEN: Final = 90
MERGE_SIZE: Final = 2
REAL: Final = "smollm2-135m"


@dataclass(frozen=True)
class Recipe:
    """A shape, the format its matrices are stored in (``wider``: those of v and down, which files often hold in more
    bits), and what the engine makes of those it cannot take as stored."""

    config: ModelConfig
    stored: str = "f32"
    quant: Quant = "q8"
    wider: str | None = None

    def stored_as(self, name: str) -> str:
        return self.wider if self.wider is not None and name.endswith(("attn_v", "down")) else self.stored


def _config(architecture: str, hidden: int, heads: tuple[int, int, int], ffn: int, **more: Any) -> ModelConfig:
    """``heads``: how many, how many for K and V, and the size of one."""
    facts: dict[str, Any] = {"n_layers": 2, "vocab_size": 100, "tied_embeddings": True} | more
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        n_heads=heads[0],
        n_kv_heads=heads[1],
        head_dim=heads[2],
        ffn_size=ffn,
        context_length=CONTEXT,
        rope_theta=10_000.0,
        rms_eps=1e-5,
        rope_adjacent_pairs=False,
        end_token_ids=(),
        **facts,
    )


def _tower(side: int) -> VisionConfig:
    return VisionConfig(
        n_layers=2,
        hidden_size=64,
        n_heads=2,
        ffn_size=72,
        patch_size=4,
        temporal_patch_size=2,
        merge_size=MERGE_SIZE,
        grid_side=side,
        deepstack_layers=(0, 1),
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        image=ImageConfig(min_pixels=64, max_pixels=4096),
    )


def _experts(n: int, active: int, *, normalise: bool, dense: tuple[int, ...] = ()) -> MoeConfig:
    return MoeConfig(n_experts=n, n_active=active, ffn_size=48, normalise=normalise, dense_layers=dense)


_SEES: Final = {"qk_norm": True, "n_layers": 3, "mrope_section": (6, 5, 5)}

RECIPES: Final = {
    "llama, three heads to one": Recipe(_config("llama", 192, (3, 1, 64), 256), "q4_1"),
    "llama, untied": Recipe(_config("llama", 64, (4, 2, 32), 96, tied_embeddings=False, vocab_size=131), "q8_0"),
    "llama, large heads, five to one": Recipe(_config("llama", 96, (5, 1, 128), 64), "q4_0"),
    "qwen2": Recipe(_config("qwen2", 64, (4, 2, 32), 112, qkv_bias=True), "f32", "q4"),
    "qwen3": Recipe(_config("qwen3", 96, (4, 2, 64), 160, qk_norm=True, tied_embeddings=False), "bf16"),
    "qwen3, 4 bits": Recipe(_config("qwen3", 64, (2, 2, 96), 160, qk_norm=True), "q4_1"),
    "llama, 4 and 6 bits": Recipe(_config("llama", 256, (4, 2, 64), 256, tied_embeddings=False), "q4_k", wider="q6_k"),
    "qwen2, 6 and 5 bits": Recipe(_config("qwen2", 256, (4, 1, 64), 256, qkv_bias=True), "q6_k", wider="q5_k"),
    "qwen3, 5 bits": Recipe(_config("qwen3", 96, (2, 2, 96), 160, qk_norm=True), "q5_1", wider="q5_0"),
    "qwen3_moe": Recipe(_config("qwen3_moe", 64, (4, 2, 32), 96, qk_norm=True, moe=_experts(8, 2, normalise=True))),
    "qwen3_moe, some layers dense": Recipe(
        _config("qwen3_moe", 64, (4, 4, 32), 96, qk_norm=True, moe=_experts(5, 3, normalise=False, dense=(0,))),
        quant="q4",
    ),
    "qwen3_vl": Recipe(_config("qwen3_vl", 64, (4, 2, 32), 96, vision=_tower(8), **_SEES)),
    "qwen3_vl_moe": Recipe(
        _config("qwen3_vl_moe", 64, (4, 1, 32), 96, vision=_tower(5), moe=_experts(6, 2, normalise=True), **_SEES)
    ),
}


@cache
def model(name: str) -> tuple[ModelFile, PackedModel]:
    """One of RECIPES, with the weights that its name stands for, or REAL, which must have been fetched."""
    if name == REAL:
        real = open_model(resolve_model(name))
        return real, pack_model(real, CONTEXT)
    recipe = RECIPES[name]
    config = recipe.config
    shapes = model_shapes(config)
    if config.vision is not None:
        shapes |= vision_shapes(config.vision, config.hidden_size)
    random = np.random.Generator(np.random.Philox(list(RECIPES).index(name)))
    tensors = {tensor: _tensor(random, tensor, shape, recipe) for tensor, shape in shapes.items()}
    file = ModelFile(Path(name), config, tensors, ())
    return file, pack_model(file, CONTEXT, recipe.quant)


def integers(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Evenly spread over -1 .. 1."""
    return (random.integers(-(1 << 15), 1 << 15, shape).astype(np.float32)) / np.float32(1 << 15)


def _tensor(random: np.random.Generator, name: str, shape: tuple[int, int], recipe: Recipe) -> StoredRows:
    values = integers(random, *shape)
    if "norm" in name and not name.endswith("_bias"):
        values = 1 + values / 4
    elif shape[0] > 1 and "positions" not in name:
        values = values * np.sqrt(np.float32(9) / np.float32(shape[1]))
    is_matrix = shape[0] > 1 and not name.startswith("vision.") and not name.endswith("router")
    kind = recipe.stored_as(name) if is_matrix else "f32"
    if kind == "bf16":
        stored = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    elif kind == "f32":
        stored = values.view(np.uint8)
    elif kind.endswith("_k"):
        seed, deviation = int(random.integers(1 << 30)), float(np.sqrt(3 / shape[1]))
        stored = gguf_blocks.random_rows(kind, *shape, seed, deviation)
    else:
        stored = quants.quantize(values, GGMLQuantizationType[kind.upper()])
    return StoredRows(shape, kind, stored)
