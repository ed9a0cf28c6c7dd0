"""What the float path does beside computing: growing sequences, small memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvferry.engine.errors import InvalidTokens, UnsupportedArchitecture
from kvferry.engine.files.open_model import open_model
from kvferry.engine.reference import Images, ReferenceModel


@pytest.fixture(scope="module")
def dense(recorded: Callable[[str], Path]) -> ReferenceModel:
    return ReferenceModel.load(recorded("qwen3_untied_f32") / "model")


@pytest.fixture(scope="module")
def seeing(recorded: Callable[[str], Path]) -> ReferenceModel:
    return ReferenceModel.load(recorded("qwen3vlmoe_bf16") / "model")


def test_token_by_token_gives_the_rows_of_the_whole(dense: ReferenceModel) -> None:
    ids = np.arange(20, dtype=np.int32) * 7 % dense.config.vocab_size
    whole, state = dense.forward(ids), dense.new_state()
    steps = [dense.step(ids[i : i + 1], state).logits for i in range(len(ids))]
    assert np.allclose(np.concatenate(steps), whole.logits, atol=1e-4)
    assert np.allclose(state.k.reshape(whole.k.shape), whole.k, atol=1e-5)


def test_weights_beyond_the_budget_are_read_anew_and_are_the_same(recorded: Callable[[str], Path]) -> None:
    file = open_model(recorded("qwen3moe_nonorm_f32") / "model")
    ids = np.arange(9, dtype=np.int32)
    kept, read_anew = ReferenceModel(file).forward(ids), ReferenceModel(file, weights_bytes_max=0).forward(ids)
    assert np.array_equal(kept.logits, read_anew.logits)


@pytest.mark.parametrize("ids", [[], [-1], [640]])
def test_tokens_outside_the_vocabulary_are_refused(dense: ReferenceModel, ids: list[int]) -> None:
    with pytest.raises(InvalidTokens, match="vocabulary of 640"):
        dense.forward(np.array(ids, np.int32))


def test_a_model_without_a_vision_tower_takes_no_images(dense: ReferenceModel) -> None:
    images = Images(np.zeros((4, 1536), np.float32), np.array([[1, 2, 2]]))
    with pytest.raises(UnsupportedArchitecture, match="qwen3 model takes no images"):
        dense.forward(np.arange(4), images)


def test_patches_that_are_not_those_of_the_grid_are_refused(
    seeing: ReferenceModel, recorded: Callable[[str], Path]
) -> None:
    golden = load_file(recorded("qwen3vlmoe_bf16") / "golden.safetensors")
    pixels, grid, ids = (golden[f"img1.{name}"] for name in ("pixel_values", "image_grid_thw", "input_ids"))
    with pytest.raises(InvalidTokens, match="the grids ask for"):
        seeing.forward(ids, Images(pixels[:-1], grid))
    with pytest.raises(InvalidTokens, match="image tokens that belong to no image"):
        seeing.forward(ids)
