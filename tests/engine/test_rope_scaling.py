"""Rope for longer contexts: divisors as the papers have them, read from both kinds of files, and used by the engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.errors import ModelInvalid
from kvferry.engine.files.checkpoint_config import read_checkpoint_config
from kvferry.engine.files.gguf_file import open_gguf
from kvferry.engine.reference.model import ReferenceModel
from kvferry.engine.rope import inverse_frequencies, rope_table
from kvferry.engine.rope_scaling import linear_divisors, llama3_divisors, yarn_divisors, yarn_magnitude

LLAMA3 = {"factor": 8.0, "low": 1.0, "high": 4.0, "original_context": 8192}


def frequencies(head_dim: int, theta: float) -> NDArray[np.float64]:
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


def test_llama3_slows_down_what_turns_less_than_once_and_leaves_what_turns_four_times() -> None:
    """Llama 3.1's own figures, in plain float64."""
    divisors = np.array(llama3_divisors(128, 500_000.0, **LLAMA3))
    wavelengths = 2 * np.pi / frequencies(128, 500_000.0)
    assert np.all(divisors[wavelengths < 8192 / 4] == 1)
    assert np.all(divisors[wavelengths > 8192] == 8)
    between = (wavelengths >= 8192 / 4) & (wavelengths <= 8192)
    assert between.sum() > 3
    smooth = (8192 / wavelengths[between] - 1.0) / (4.0 - 1.0)
    assert np.allclose(1 / divisors[between], (1 - smooth) / 8 + smooth, rtol=1e-6)


def test_yarn_keeps_fast_frequencies_and_interpolates_slow_ones() -> None:
    """Qwen3's documented setting: 4 x from 32,768."""
    divisors = np.array(yarn_divisors(128, 1e6, factor=4.0, original_context=32_768))
    dims = [128 * np.log(32_768 / (turns * 2 * np.pi)) / (2 * np.log(1e6)) for turns in (32.0, 1.0)]
    ramp = np.clip((np.arange(64) - np.floor(dims[0])) / (np.ceil(dims[1]) - np.floor(dims[0])), 0, 1)
    assert np.allclose(1 / divisors, ramp / 4 + (1 - ramp), rtol=1e-6)
    assert divisors[0] == 1
    assert divisors[-1] == 4
    assert yarn_magnitude(4.0) == pytest.approx(0.1 * np.log(4.0) + 1)
    assert yarn_magnitude(1.0) == 1.0


def test_a_divided_frequency_turns_as_much_more_slowly() -> None:
    divisors = linear_divisors(64, 4.0)
    assert np.array_equal(inverse_frequencies(64, 1e4, divisors), inverse_frequencies(64, 1e4) / np.float32(4))
    table = rope_table(100, 64, 1e4, divisors, 1.25)
    plain = rope_table(100, 64, 1e4)
    assert np.allclose(table[40], plain[10] * 1.25, atol=2e-7)
    assert rope_table(100, 64, 1e4, (1.0,) * 32, 1.0).tobytes() == plain.tobytes()


@pytest.fixture
def rescaled(recorded: Callable[[str], Path], tmp_path: Path) -> Callable[[dict[str, Any] | None], Path]:
    """A recorded model's folder with another ``rope_scaling``."""

    def make(scaling: dict[str, Any] | None) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(recorded("qwen3_untied_f32") / "model", folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["rope_scaling"] = scaling
        path.write_text(json.dumps(config))
        return folder

    return make


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=[scaling["rope_type"] for scaling in SCALINGS])
def test_the_engine_turns_rows_as_the_reference_does(
    rescaled: Callable[[dict[str, Any] | None], Path], scaling: dict[str, Any]
) -> None:
    ids = np.random.default_rng(1).integers(0, 600, 96).astype(np.int32)
    logits, config = {}, {}
    for name, folder in (("plain", rescaled(None)), ("scaled", rescaled(scaling))):
        engine = Engine.load(folder, EngineOptions(n_threads=1, kv_bytes=1 << 24))
        sequence = engine.new_sequence()
        logits[name] = engine.forward([Chunk(sequence, ids, "all")])[0]
        engine.close()
        config[name] = engine.fingerprint
        if name == "scaled":
            expected = ReferenceModel.load(folder).forward(ids).logits
    error = np.abs(logits["scaled"] - expected).max()
    assert error < 0.2 * np.abs(logits["plain"] - expected).max()
    assert config["plain"] != config["scaled"], "rows of the two must never meet"


def write_gguf(path: Path, divisors: NDArray[np.float32] | None, **figures: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in figures.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.rope.scaling.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_states_divisors_one_by_one_or_by_a_rule(tmp_path: Path) -> None:
    stored = np.linspace(1, 8, 16, dtype=np.float32)
    assert open_gguf(write_gguf(tmp_path / "a.gguf", stored)).config.rope_divisors == tuple(stored.tolist())
    linear = open_gguf(write_gguf(tmp_path / "b.gguf", None, type="linear", factor=2.0)).config
    assert linear.rope_divisors == (2.0,) * 16
    yarn = open_gguf(write_gguf(tmp_path / "c.gguf", None, type="yarn", factor=4.0)).config
    assert yarn.rope_divisors == yarn_divisors(32, 10_000.0, factor=4.0, original_context=1024)
    assert yarn.rope_magnitude == yarn_magnitude(4.0)


@pytest.mark.parametrize("bad", [np.zeros(16, np.float32), np.full(16, np.nan, np.float32), np.ones(15, np.float32)])
def test_divisors_that_cannot_be_are_refused(tmp_path: Path, bad: NDArray[np.float32]) -> None:
    with pytest.raises(ModelInvalid, match=r"m\.gguf.*rope divisors must be"):
        _ = open_gguf(write_gguf(tmp_path / "m.gguf", bad)).config


def test_a_checkpoint_states_a_rule(rescaled: Callable[[dict[str, Any] | None], Path]) -> None:
    config = read_checkpoint_config(rescaled(SCALINGS[1]))
    given = {"factor": 8.0, "low": 1.0, "high": 4.0, "original_context": 64}
    assert config.rope_divisors == llama3_divisors(config.head_dim, config.rope_theta, **given)
    assert read_checkpoint_config(rescaled(SCALINGS[2])).rope_magnitude == yarn_magnitude(4.0)
    assert "rope_divisors" not in read_checkpoint_config(rescaled(None)).as_dict()
