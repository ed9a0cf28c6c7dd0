"""config.json in all its spellings; what cannot be run is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.config import ModelConfig
from kvferry.engine.errors import EngineError, ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.checkpoint_config import read_checkpoint_config

Recorded = Callable[[str], Path]
Read = Callable[..., ModelConfig]


@pytest.fixture
def read(recorded: Recorded, tmp_path: Path) -> Read:
    """Reads a recorded model's config with changes: ``text`` and ``vision`` go into the nested parts; None removes."""

    def read_changed(
        name: str, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **changes: Any
    ) -> ModelConfig:
        config = json.loads((recorded(name) / "model" / "config.json").read_text())
        for part, more in ((config.get("text_config", config), text), (config.get("vision_config", {}), vision)):
            part.update(more or {})
        config.update(changes)
        for key in [key for key, value in config.items() if value is None]:
            del config[key]
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_checkpoint_config(tmp_path)

    return read_changed


def test_rope_in_its_newer_place_is_the_same_model(read: Read) -> None:
    older = read("qwen3_untied_f32")
    newer = read("qwen3_untied_f32", rope_theta=None, rope_parameters={"rope_theta": 1000000, "rope_type": "default"})
    assert newer == older
    assert older.rope_theta == 1e6
    section = {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default", "rope_theta": 5e6}
    with_image = read("qwen3vlmoe_bf16", text={"rope_theta": None, "rope_scaling": None, "rope_parameters": section})
    assert with_image == read("qwen3vlmoe_bf16")
    assert (with_image.mrope_section, with_image.rope_theta) == ((6, 5, 5), 5e6)


def test_experts_of_some_layers(read: Read) -> None:
    def sparse(**changes: Any) -> list[int]:
        config = read("qwen3moe_nonorm_f32", num_hidden_layers=6, **changes)
        return [layer for layer in range(6) if config.is_sparse(layer)]

    assert sparse(mlp_only_layers=[]) == [0, 1, 2, 3, 4, 5]
    assert sparse(mlp_only_layers=[0, 4]) == [1, 2, 3, 5]
    assert sparse(mlp_only_layers=[], decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(mlp_only_layers=[3], decoder_sparse_step=2) == [1, 5]


def test_experts_chosen_are_normalised_as_the_config_says_or_always(read: Read) -> None:
    def normalises(name: str, **changes: Any) -> bool:
        moe = read(name, **changes).moe
        assert moe is not None
        return moe.normalise

    assert not normalises("qwen3moe_nonorm_f32")
    assert normalises("qwen3moe_nonorm_f32", norm_topk_prob=True)
    assert not normalises("qwen3moe_nonorm_f32", norm_topk_prob=None), "the config's own default"
    assert normalises("qwen3vlmoe_bf16", text={"norm_topk_prob": False}), "a Qwen3-VL-MoE always does"


def test_end_tokens_come_from_the_generation_config_first(read: Read, tmp_path: Path) -> None:
    assert read("qwen3_untied_f32").end_token_ids == (639,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5, 3]}')
    assert read("qwen3_untied_f32").end_token_ids == (3, 5)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read("qwen3vlmoe_bf16").end_token_ids == (767,)


def test_image_limits_in_every_place_they_are_stated(read: Read, tmp_path: Path) -> None:
    def limits() -> tuple[int, int]:
        vision = read("qwen3vlmoe_bf16").vision
        assert vision is not None
        return vision.image.min_pixels, vision.image.max_pixels

    assert limits() == (65_536, 16_777_216)
    stated = {"size": {"shortest_edge": 1024, "longest_edge": 4096}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": stated}))
    assert limits() == (1024, 4096)
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 5, "max_pixels": 6}')
    assert limits() == (5, 6)


@pytest.mark.parametrize(
    ("name", "changes", "error", "reason"),
    [
        ("qwen3_untied_f32", {"model_type": "mamba"}, UnsupportedArchitecture,
         "'mamba' is not supported; supported are llama, qwen2, qwen3, qwen3_moe, qwen3_vl, qwen3_vl_moe"),
        ("qwen3_untied_f32", {"model_type": None}, ModelInvalid, "'model_type' is missing"),
        ("qwen3_untied_f32", {"hidden_size": "96"}, ModelInvalid, "'hidden_size' is of type str, expected int"),
        ("qwen3_untied_f32", {"hidden_size": True}, ModelInvalid, "is of type bool, expected int"),
        ("qwen3_untied_f32", {"hidden_size": 1 << 60}, ModelInvalid, "hidden_size is 1152921504606846976"),
        ("qwen3_untied_f32", {"num_hidden_layers": 10**9}, ModelInvalid, "n_layers is 1000000000"),
        ("qwen3_untied_f32", {"head_dim": None}, ModelInvalid, "'head_dim' is missing"),
        ("qwen3_untied_f32", {"rope_theta": None}, ModelInvalid, "'rope_theta' is missing"),
        ("qwen3_untied_f32", {"rms_norm_eps": float("nan")}, ModelInvalid, "rms_eps is nan"),
        ("qwen3_untied_f32", {"rope_scaling": {"rope_type": "longrope"}}, UnsupportedArchitecture,
         "rope scaling 'longrope' is not supported; supported are linear, llama3, yarn"),
        ("qwen3_untied_f32", {"rope_scaling": {"type": "linear"}}, ModelInvalid, "'factor' is missing"),
        ("qwen3_untied_f32", {"rope_scaling": {"type": "linear", "factor": 0.5}}, ModelInvalid, "scaled by 0.5"),
        ("qwen3_untied_f32", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
         "high_freq_factor": 1.0}}, ModelInvalid, "must lie between 0 and 1.0"),
        ("qwen3_untied_f32", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, UnsupportedArchitecture,
         "yarn with mscale"),
        ("qwen3_untied_f32", {"rope_scaling": []}, ModelInvalid, "'rope_scaling' is of type list, expected object"),
        ("qwen3_untied_f32", {"partial_rotary_factor": 0.5}, UnsupportedArchitecture, "a part of a head"),
        ("qwen3_untied_f32", {"hidden_act": "gelu"}, UnsupportedArchitecture, "activation 'gelu'"),
        ("qwen3_untied_f32", {"attention_bias": True}, UnsupportedArchitecture, "attention_bias = true"),
        ("qwen3_untied_f32", {"use_sliding_window": True}, UnsupportedArchitecture, "sliding window"),
        ("qwen3_untied_f32", {"layer_types": ["full_attention", "linear"]}, UnsupportedArchitecture, "full attention"),
        ("qwen3_untied_f32", {"eos_token_id": 640}, ModelInvalid, "end token 640 lies outside"),
        ("qwen3moe_nonorm_f32", {"mlp_only_layers": [2]}, ModelInvalid, "do not fit 2 layers"),
        ("qwen3moe_nonorm_f32", {"decoder_sparse_step": 0}, ModelInvalid, "do not fit 2 layers"),
        ("qwen3moe_nonorm_f32", {"num_experts_per_tok": 7}, ModelInvalid, "chooses 7 experts of only 6"),
        ("qwen3vlmoe_bf16", {"text": {"rope_scaling": {"mrope_section": [6, 5, 4]}}}, ModelInvalid, "must share out"),
        ("qwen3vlmoe_bf16", {"text": {"rope_scaling": {"mrope_section": [16]}}}, ModelInvalid, "has 1 parts"),
        ("qwen3vlmoe_bf16", {"text": {"rope_scaling": {"mrope_interleaved": False, "mrope_section": [6, 5, 5]}}},
         UnsupportedArchitecture, "mrope that is not interleaved"),
        ("qwen3vlmoe_bf16", {"vision": {"num_position_embeddings": 63}}, ModelInvalid, "do not form a square grid"),
        ("qwen3vlmoe_bf16", {"vision": {"out_hidden_size": 65}}, ModelInvalid, "makes rows of 65 elements"),
        ("qwen3vlmoe_bf16", {"vision": {"deepstack_visual_indexes": [4]}}, ModelInvalid, "lie outside a vision tower"),
        ("qwen3vlmoe_bf16", {"vision": {"num_heads": 5}}, ModelInvalid, "must divide its hidden size"),
        ("qwen3vlmoe_bf16", {"vision": {"in_channels": 4}}, UnsupportedArchitecture, "4 channels"),
        ("qwen3vlmoe_bf16", {"image_token_id": 768}, ModelInvalid, "image_token_id 768 lies outside"),
        ("qwen3vlmoe_bf16", {"vision_config": None}, ModelInvalid, "is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_by_name(
    name: str, changes: dict[str, Any], error: type[EngineError], reason: str, read: Read, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason) as caught:
        read(name, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (1 << 20) + b"{}"])
def test_a_config_that_is_none_is_refused(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(body)
    with pytest.raises(ModelInvalid, match=r"config\.json"):
        read_checkpoint_config(tmp_path)
