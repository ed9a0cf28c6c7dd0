"""A checkpoint folder is read tensor by tensor, and what is incomplete or contradictory is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from kvferry.engine.errors import EngineError, ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.open_model import open_model
from kvferry.engine.text.model import TextModel

Recorded = Callable[[str], Path]
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def dense(recorded: Recorded, tmp_path: Path) -> Path:
    return _copy(recorded("qwen3_untied_f32"), tmp_path / "dense")


@pytest.fixture
def sharded(recorded: Recorded, tmp_path: Path) -> Path:
    return _copy(recorded("qwen3vlmoe_bf16"), tmp_path / "sharded")


def _copy(recorded: Path, target: Path) -> Path:
    shutil.copytree(recorded / "model", target, copy_function=shutil.copyfile)
    target.chmod(0o755)
    return target


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refused(folder: Path, error: type[EngineError] = ModelInvalid) -> str:
    with pytest.raises(error) as caught:
        open_model(folder)
    sentence = str(caught.value)
    assert str(folder) in sentence
    assert "\n" not in sentence
    return sentence


def test_rows_are_those_of_the_file(dense: Path) -> None:
    model, theirs = open_model(dense), load_file(dense / "model.safetensors")
    q = model.tensors["layers.1.attn_q"]
    assert (q.shape, q.kind) == ((192, 96), "f32")
    assert np.array_equal(q.read(10, 20), theirs["model.layers.1.self_attn.q_proj.weight"][10:20])
    rows = q.read()
    rows[:] = 0  # the caller's own
    assert np.array_equal(q.read(), theirs["model.layers.1.self_attn.q_proj.weight"])
    stored = q.stored(0, 1)
    assert stored is not None
    assert stored.tobytes() == q.read(0, 1).tobytes()
    with pytest.raises(ValueError, match="read-only"):
        stored[0, 0] = 1


def test_shards_are_one_model_with_one_digest(sharded: Path) -> None:
    model = open_model(sharded)
    assert [path.name for path in model.weight_files] == ["model-00001-of-00002.safetensors", SHARD]
    assert model.tensors["vision.deepstack.2.fc1"].shape == (256, 256)
    digest = model.weights_sha256()
    body = bytearray((sharded / SHARD).read_bytes())
    body[-1] ^= 1
    (sharded / SHARD).unlink()
    (sharded / SHARD).write_bytes(body)
    assert open_model(sharded).weights_sha256() != digest


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_float_types_are_read_as_they_are(dtype: str, dense: Path) -> None:
    weights = {name: array.astype(dtype) for name, array in load_file(dense / "model.safetensors").items()}
    (dense / "model.safetensors").unlink()
    save_file(weights, dense / "model.safetensors")
    tensor = open_model(dense).tensors["layers.0.ffn_down"]
    assert tensor.kind == ("f16" if dtype == "float16" else "f32")
    assert np.array_equal(tensor.read(), weights["model.layers.0.mlp.down_proj.weight"].astype(np.float32))


def test_fused_experts_are_the_same_transposed_and_straight(sharded: Path) -> None:
    """Some tools re-save them as [expert, out, in]; the shapes tell which."""
    released = open_model(sharded)
    experts = {name: tensor.read() for name, tensor in released.tensors.items() if ".experts." in name}
    assert experts["layers.0.experts.7.down"].shape == (64, 48)
    assert released.tensors["layers.0.experts.7.down"].stored() is None
    assert np.array_equal(released.tensors["layers.0.experts.3.up"].read(5, 9), experts["layers.0.experts.3.up"][5:9])
    for path in sorted(sharded.glob("*.safetensors")):
        header: dict[str, Any] = {}
        body = b""
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            array = np.frombuffer(tensor["data"], np.uint16).reshape(tensor["shape"])
            array = array.swapaxes(1, 2) if ".mlp.experts." in name else array
            offsets = [len(body), len(body) + array.nbytes]
            header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": offsets}
            body += array.tobytes()
        text = json.dumps(header).encode()
        path.unlink()
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    resaved = open_model(sharded)
    for name, rows in experts.items():
        assert np.array_equal(resaved.tensors[name].read(), rows)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARD).unlink()
    assert f"{SHARD} is missing, and model.safetensors.index.json names it; fetch" in refused(sharded)


def test_a_cut_shard_is_named(sharded: Path) -> None:
    body = (sharded / SHARD).read_bytes()
    (sharded / SHARD).unlink()
    (sharded / SHARD).write_bytes(body[:-10])
    assert f"{SHARD} was cut short: it has {len(body) - 10} bytes and should have {len(body)}" in refused(sharded)


def test_shards_that_the_index_does_not_describe_are_refused(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = {**index["weight_map"], "lm_head.weight": SHARD}
    path.write_text(json.dumps({"weight_map": moved}))
    assert "holds tensor 'lm_head.weight', and model.safetensors.index.json says otherwise" in refused(sharded)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "more": SHARD}}))
    assert f"tensor 'more' is missing from {SHARD}" in refused(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x\0.safetensors", "x.bin", ""])
def test_an_index_cannot_name_files_elsewhere(name: str, sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert "is not the name of a safetensors file in the folder" in refused(sharded)


@pytest.mark.parametrize("body", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(body: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(body)
    refused(sharded)


def test_a_folder_without_weights_or_config_is_refused(dense: Path, tmp_path: Path) -> None:
    (dense / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(dense)
    (tmp_path / "empty").mkdir()
    assert "a folder without a config.json, so it is not a model" in refused(tmp_path / "empty")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 3}, "tensor 'model.layers.2.input_layernorm.weight' is missing, and config.json asks"),
        ({"num_hidden_layers": 1}, "holds tensor 'model.layers.1."),
        (
            {"vocab_size": 641},
            r"'model.embed_tokens.weight' has shape \[640, 96\], and config.json asks for \[641, 96\]",
        ),
        ({"num_key_value_heads": 3}, "k_proj.weight' has shape"),
        ({"intermediate_size": 255}, "gate_proj.weight' has shape"),
        ({"head_dim": 16}, "q_proj.weight' has shape"),
        ({"model_type": "qwen2"}, "q_proj.bias' is missing"),
        ({"model_type": "llama"}, "holds tensor 'model.layers...self_attn.._norm.weight', which a llama"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(changes: dict[str, Any], reason: str, dense: Path) -> None:
    edit(dense, **changes)
    with pytest.raises(ModelInvalid, match=reason):
        open_model(dense)


def test_a_tied_model_may_hold_a_copy_of_its_head(dense: Path) -> None:
    edit(dense, tie_word_embeddings=True)
    assert "head" not in open_model(dense).tensors


def test_a_type_that_is_no_weight_is_refused_by_name(dense: Path) -> None:
    weights = load_file(dense / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float64)
    (dense / "model.safetensors").unlink()
    save_file(weights, dense / "model.safetensors")
    assert "'model.norm.weight' is stored as F64; supported are F32, F16, BF16" in refused(
        dense, UnsupportedArchitecture
    )


def test_a_missing_tokenizer_is_one_sentence(dense: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"has no tokenizer\.json, so it is not a whole model; fetch it again"):
        TextModel.load(dense)
