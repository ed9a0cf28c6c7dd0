"""`kvferry score` end to end on the real model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from kvferry.engine.commands.score import score
from kvferry.engine.errors import InvalidTokens, UnsupportedArchitecture

TOKENS = np.array([1, 504, 3575, 282, 260, 3284, 314], np.int32)


def run(model: Path, source: Path, output: Path, *options: str) -> Result:
    arguments = ["--model", str(model), "--input", str(source), "--output", str(output), *options]
    return CliRunner().invoke(score, arguments)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file({"input_ids": TOKENS}, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_the_output_holds_what_was_computed_however_it_was_cut(smollm2_path, source, tmp_path):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert run(smollm2_path, source, one, "--greedy", "4").exit_code == 0
    assert (
        run(smollm2_path, source, two, "--greedy", "4", "--chunk", "2", "--threads", "2", "--kv", "f32").exit_code == 0
    )
    assert one.read_bytes() == two.read_bytes()
    found = load_file(one)
    assert {name: (array.shape, str(array.dtype)) for name, array in found.items()} == {
        "logits": ((7, 49152), "float32"),
        "k": ((30, 7, 192), "float32"),
        "v": ((30, 7, 192), "float32"),
        "greedy_ids": ((4,), "int32"),
    }
    assert found["greedy_ids"][0] == found["logits"][-1].argmax()


@pytest.mark.parametrize(
    "tensors",
    [{}, {"input_ids": TOKENS.astype(np.int64)}, {"input_ids": TOKENS[:0]}, {"input_ids": np.array([49152], np.int32)}],
    ids=["missing", "int64", "empty", "outside the vocabulary"],
)
def test_tokens_that_are_none_are_refused_in_a_sentence(smollm2_path, tmp_path, tensors):
    source = tmp_path / "in.safetensors"
    save_file(tensors, source)
    result = run(smollm2_path, source, tmp_path / "out.safetensors")
    assert isinstance(result.exception, InvalidTokens)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.fixture
def seeing(recorded, tmp_path: Path) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A model that sees, a source with a prompt of two images, and what the oracle made of it."""
    folder = recorded("qwen3vl_tied_bf16")
    golden = {
        key.removeprefix("img2."): value
        for key, value in load_file(folder / "golden.safetensors").items()
        if key.startswith("img2.")
    }
    save_file({name: golden[name] for name in ("input_ids", "pixel_values", "image_grid_thw")}, tmp_path / "in.st")
    return folder, tmp_path / "in.st", golden


def test_images_are_scored_however_the_text_is_cut(seeing, tmp_path):
    folder, source, golden = seeing
    one, two, float_path = (tmp_path / f"{i}.safetensors" for i in range(3))
    assert run(folder / "model", source, one, "--greedy", "5").exit_code == 0
    assert run(folder / "model", source, two, "--greedy", "5", "--chunk", "7", "--threads", "2").exit_code == 0
    assert one.read_bytes() == two.read_bytes()
    assert run(folder / "model", source, float_path, "--reference", "--greedy", "5").exit_code == 0
    found, exact = load_file(one), load_file(float_path)
    assert {name: array.shape for name, array in found.items()} == {name: array.shape for name, array in exact.items()}
    assert np.array_equal(found["position_ids"], golden["position_ids"])
    for name in ("image_embeds", "deepstack"):
        assert np.abs(exact[name] - golden[name]).max() <= 1e-4
        assert np.abs(found[name] - golden[name]).max() <= 0.2


def test_images_out_of_files_stand_where_one_token_stood(seeing, tmp_path):
    folder, source, golden = seeing
    config = json.loads((folder / "model" / "config.json").read_text())
    ids = golden["input_ids"]
    is_image = ids == config["image_token_id"]
    short = ids[~(is_image & np.concatenate([[False], is_image[:-1]]))]
    save_file({"input_ids": short}, tmp_path / "short.st")
    files = [option for i in range(2) for option in ("--image", str(folder / f"img2_{i}.png"))]
    given, made = tmp_path / "given.safetensors", tmp_path / "made.safetensors"
    assert run(folder / "model", source, given).exit_code == 0
    assert run(folder / "model", tmp_path / "short.st", made, *files).exit_code == 0
    given_arrays, made_arrays = load_file(given), load_file(made)
    assert np.array_equal(given_arrays["position_ids"], made_arrays["position_ids"])
    assert np.abs(given_arrays["image_embeds"] - made_arrays["image_embeds"]).max() <= 0.05


def test_images_for_a_model_that_sees_none_are_refused(recorded, seeing, tmp_path):
    _, source, _ = seeing
    result = run(recorded("qwen3_untied_f32") / "model", source, tmp_path / "out.safetensors")
    assert isinstance(result.exception, UnsupportedArchitecture)


@pytest.mark.parametrize("options", [(), ("--quant", "q4"), ("--reference",)], ids=str)
def test_every_kind_of_model_is_scored(recorded, tmp_path, options):
    folder = recorded("qwen3moe_nonorm_f32")
    golden = load_file(folder / "golden.safetensors")
    save_file({"input_ids": golden["p37.input_ids"]}, tmp_path / "in.st")
    output = tmp_path / "out.safetensors"
    assert run(folder / "model", tmp_path / "in.st", output, *options).exit_code == 0
    difference = np.sqrt(np.mean((load_file(output)["logits"] - golden["p37.logits"]) ** 2))
    limits = {(): 0.3, ("--quant", "q4"): 2.0, ("--reference",): 1e-3}
    assert difference <= limits[options]
