"""The float path computes what the oracle recorded, for every architecture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from kvferry.engine.reference import Images, ReferenceModel, ReferenceOutput

MODELS = [
    "llama_tied_bf16",
    "qwen2_bias_f32",
    "qwen3_tied_bf16",
    "qwen3_untied_f32",
    "qwen3moe_bf16_sharded",
    "qwen3moe_mixed_f32",
    "qwen3moe_nonorm_f32",
    "qwen3vl_tied_bf16",
    "qwen3vl_untied_f32",
    "qwen3vlmoe_bf16",
]
N_GREEDY = 32
RELATIVE = 2e-4
NOISE = 0.01  # margins above this are no matter of rounding; the oracle's own noise is below 3e-4


@pytest.mark.parametrize("name", MODELS)
def test_every_recorded_prompt(name: str, recorded: Callable[[str], Path]) -> None:
    folder = recorded(name)
    golden = load_file(folder / "golden.safetensors")
    facts = json.loads((folder / "golden.json").read_text())
    model = ReferenceModel.load(folder / "model")
    for prompt in facts["prompts"]:
        expected = {key.split(".", 1)[1]: value for key, value in golden.items() if key.startswith(f"{prompt}.")}
        images = None
        if "pixel_values" in expected:
            images = Images(expected["pixel_values"], expected["image_grid_thw"])
        output = model.forward(expected["input_ids"], images, n_greedy=N_GREEDY)
        assert_same_rows(output, expected)
        assert_same_greedy(output, expected)
        if images is not None:
            assert_same_image(output, expected)
        if facts["moe_layers"]:
            assert_same_routing(output, expected, facts["moe_layers"])


def assert_same_rows(output: ReferenceOutput, expected: dict[str, Any]) -> None:
    rows = expected["logit_positions"]
    assert_close(output.logits[rows], expected["logits"], 1e-3)
    assert_close(output.k[:, rows], expected["k"], 5e-4)
    assert_close(output.v[:, rows], expected["v"], 5e-4)
    if "hidden" in expected:
        assert_close(output.hidden, expected["hidden"], 5e-4)
    if "position_ids" in expected:
        assert np.array_equal(output.position_ids, expected["position_ids"])
        assert output.rope_delta == expected["rope_delta"][0]


def assert_same_greedy(output: ReferenceOutput, expected: dict[str, Any]) -> None:
    clear = expected["greedy_margins"] > NOISE
    n_same = len(clear) if clear.all() else int(np.argmin(clear))
    assert n_same > 0
    assert output.greedy_ids[:n_same].tolist() == expected["greedy_ids"][:n_same].tolist()


def assert_same_image(output: ReferenceOutput, expected: dict[str, Any]) -> None:
    assert output.image is not None
    assert_close(output.image.patch_embed, expected["vision_patch_embed"], 1e-4)
    assert_close(output.image.first, expected["vision_block_in0"], 1e-4)
    assert_close(output.image.last, expected["vision_last_hidden"], 1e-4)
    assert_close(output.image.embeds, expected["image_embeds"], 1e-4)
    assert_close(output.image.deepstack, expected["deepstack"], 1e-4)


def assert_same_routing(output: ReferenceOutput, expected: dict[str, Any], layers: list[int]) -> None:
    assert sorted(output.routings) == layers
    rows = expected["logit_positions"]
    routings = [output.routings[layer] for layer in layers]
    assert_close(np.stack([r.logits[rows] for r in routings]), expected["router_logits"], 1e-4)
    assert np.array_equal(np.stack([r.expert_ids[rows] for r in routings]), expected["router_topk_ids"])
    assert_close(np.stack([r.weights[rows] for r in routings]), expected["router_topk_weights"], 1e-4)


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32], absolute: float) -> None:
    assert ours.shape == theirs.shape
    difference = np.abs(ours - theirs).max()
    assert difference <= min(absolute, RELATIVE * np.abs(theirs).max())
