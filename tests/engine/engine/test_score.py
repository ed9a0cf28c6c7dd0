"""`kvferry score` end to end on the real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from kvferry.engine.commands.score import score
from kvferry.engine.errors import InvalidTokens

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
