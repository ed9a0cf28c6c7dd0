"""The same model out of a GGUF file is the same model to the engine, to the bit."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvferry.engine.engine import Engine, EngineOptions

TOKENS = np.arange(3, 40, dtype=np.int32)


def sibling(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


models = sibling("recorded_models", Path(__file__).parent / "recorded_models.py")
twins = sibling("gguf_twin", Path(__file__).parents[1] / "files" / "gguf_twin.py")


def computed(model: Path) -> bytes:
    engine = Engine.load(model, EngineOptions(n_threads=1, kv_bytes=models.KV_BYTES, context_length=512))
    try:
        return models.bits(engine, *models.run(engine, TOKENS, [512]))
    finally:
        engine.close()


@pytest.mark.parametrize(
    "name", ["llama_tied_bf16", "qwen2_bias_f32", "qwen3_untied_f32", "qwen3moe_nonorm_f32", "qwen3vlmoe_bf16"]
)
def test_a_file_of_floats_gives_the_bits_of_the_folder(
    name: str, recorded: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = recorded(name) / "model"
    assert computed(twins.write_twin(folder, tmp_path / "twin.gguf")) == computed(folder)


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q4_0"])
def test_quantised_files_run(kind: str, recorded: Callable[[str], Path], tmp_path: Path) -> None:
    """As they are stored: near the folder's logits, as near as the format allows."""
    folder = recorded("qwen3_untied_f32") / "model"
    exact, found = (
        np.frombuffer(bits, np.float32)[: len(TOKENS) * 640]
        for bits in (computed(folder), computed(twins.write_twin(folder, tmp_path / "twin.gguf", kind)))
    )
    difference = np.sqrt(np.mean((exact - found) ** 2) / np.mean(exact**2))
    assert difference <= {"q8_0": 0.05, "q5_1": 0.25, "q4_0": 0.6}[kind]
