"""The fingerprint is the same everywhere, and another one when any ingredient differs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from kvferry.engine.config import ImageConfig, ModelConfig, MoeConfig, VisionConfig
from kvferry.engine.fingerprint import fingerprint

CONFIG = ModelConfig(
    architecture="llama",
    n_layers=30,
    hidden_size=576,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    ffn_size=1536,
    vocab_size=49152,
    context_length=8192,
    rope_theta=100_000.0,
    rms_eps=9.999999747378752e-06,
    tied_embeddings=True,
    rope_adjacent_pairs=True,
    end_token_ids=(2,),
)
MOE = MoeConfig(n_experts=8, n_active=2, ffn_size=96, normalise=True)
VISION = VisionConfig(
    n_layers=4,
    hidden_size=64,
    n_heads=4,
    ffn_size=112,
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    grid_side=8,
    deepstack_layers=(0, 1),
    image_token_id=7,
    video_token_id=8,
    vision_start_token_id=9,
    vision_end_token_id=10,
    image=ImageConfig(min_pixels=1024, max_pixels=65536),
)
SEEING = dataclasses.replace(CONFIG, moe=MOE, mrope_section=(12, 10, 10), vision=VISION)
INGREDIENTS: dict[str, Any] = {
    "weights_sha256": "b179",
    "config": CONFIG,
    "quant_recipe": "q4_1 x int8",
    "tokenizer_digest": "9b14",
    "kv_kind": "f32",
    "numerics_version": 1,
}


def test_it_is_a_constant_of_its_ingredients() -> None:
    """Written down once: another value would make every stored snapshot unreachable."""
    assert fingerprint(**INGREDIENTS) == "73d41270233908433f28e4400a4bfdef"


def test_it_does_not_depend_on_the_hash_seed() -> None:
    code = f"import runpy; names = runpy.run_path({__file__!r}); print(names['fingerprint'](**names['INGREDIENTS']))"
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert answers == {fingerprint(**INGREDIENTS)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights_sha256", "b17a"),
        ("quant_recipe", "q8_0 x int8"),
        ("tokenizer_digest", "9b15"),
        ("kv_kind", "f16"),
        ("numerics_version", 2),
    ],
)
def test_each_ingredient_changes_it(name: str, value: Any) -> None:
    assert fingerprint(**{**INGREDIENTS, name: value}) != fingerprint(**INGREDIENTS)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelConfig)])
def test_each_number_of_the_config_changes_it(field: str) -> None:
    other: dict[str, Any] = {
        "architecture": "qwen3",
        "n_heads": 12,
        "n_kv_heads": 9,
        "rope_theta": 100_000.00000000001,
        "rms_eps": 1e-5,
        "tied_embeddings": False,
        "rope_adjacent_pairs": False,
        "end_token_ids": (2, 0),
        "qkv_bias": True,
        "qk_norm": True,
        "moe": None,
        "mrope_section": (10, 12, 10),
        "rope_divisors": (2.0,) * (SEEING.head_dim // 2),
        "vision": None,
    }
    value: Any = other[field] if field in other else getattr(SEEING, field) + 2
    more: dict[str, Any] = {"mrope_section": (13, 10, 10)} if field == "head_dim" else {}
    assert_another(**{field: value}, **more)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(MoeConfig)])
def test_each_number_of_the_experts_changes_it(field: str) -> None:
    other: dict[str, Any] = {"normalise": False, "dense_layers": (0,)}
    changes = {field: other[field] if field in other else getattr(MOE, field) + 2}
    assert_another(moe=dataclasses.replace(MOE, **changes))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(VisionConfig)])
def test_each_number_of_the_vision_tower_changes_it(field: str) -> None:
    other: dict[str, Any] = {
        "hidden_size": 128,
        "n_heads": 8,
        "deepstack_layers": (0, 2),
        "image": ImageConfig(min_pixels=1024, max_pixels=65536, mean=(0.5, 0.5, 0.4)),
    }
    changes = {field: other[field] if field in other else getattr(VISION, field) + 2}
    assert_another(vision=dataclasses.replace(VISION, **changes))


def test_fields_that_a_model_does_not_use_leave_it_as_it_was() -> None:
    """Snapshots of a plain decoder stay reachable when the config learns of another architecture's part."""
    assert set(CONFIG.as_dict()) == {f.name for f in dataclasses.fields(CONFIG)} - {
        "qkv_bias",
        "qk_norm",
        "moe",
        "mrope_section",
        "rope_divisors",
        "rope_magnitude",
        "vision",
    }


def assert_another(**changes: Any) -> None:
    changed = dataclasses.replace(SEEING, **changes)
    assert fingerprint(**{**INGREDIENTS, "config": changed}) != fingerprint(**{**INGREDIENTS, "config": SEEING})


def test_ingredients_cannot_flow_into_each_other() -> None:
    one = fingerprint(**{**INGREDIENTS, "kv_kind": 'f32","numerics":"1'})
    other = fingerprint(**{**INGREDIENTS, "weights_sha256": 'b179","kv":"f32'})
    assert len({one, other, fingerprint(**INGREDIENTS)}) == 3
