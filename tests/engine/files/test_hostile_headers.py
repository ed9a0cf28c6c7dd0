"""Promise 34: hostile model files are refused with declared errors, within bounded memory."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvferry.engine.errors import ModelInvalid
from kvferry.engine.files.checkpoint_config import read_checkpoint_config
from kvferry.engine.files.gguf_file import open_gguf
from kvferry.engine.files.gguf_header import HeaderDamaged, read_header
from kvferry.engine.files.safetensors_header import MAX_HEADER_BYTES, read_safetensors_header
from kvferry.engine.files.tensor_names import checkpoint_name, model_shapes

MIB = 1 << 20
MEMORY_MIB = 64
HOSTILE = Path(__file__).with_name("hostile_headers.py")


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
@pytest.mark.parametrize("n_mutations", [4_000, pytest.param(25_000, marks=pytest.mark.slow)])
def test_mutated_headers(kind: str, n_mutations: int, write_twin: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_tiny_mixture(tmp_path / "m")
    if kind == "gguf":
        write_twin(folder, tmp_path / "m.gguf")
    command = [sys.executable, str(HOSTILE), str(tmp_path), kind, "1", str(n_mutations)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert sum(report["outcomes"].values()) == n_mutations
    assert report["outcomes"]["ModelInvalid"] > n_mutations / 2
    assert report["bad_sentences"] == []
    assert report["grown_mib"] <= MEMORY_MIB


def write_tiny_mixture(folder: Path) -> Path:
    """A whole model of one layer and two experts, small enough to be written many thousand times."""
    folder.mkdir()
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "vocab_size": 24,
        "max_position_embeddings": 64,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    shape = read_checkpoint_config(folder)
    weights = {
        checkpoint_name(name, shape): np.zeros(size if size[0] > 1 else size[1:], np.float32)
        for name, size in model_shapes(shape).items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def safetensors_bytes(header: bytes, n_data: int = 0, length: int | None = None) -> memoryview:
    return memoryview(struct.pack("<Q", len(header) if length is None else length) + header + bytes(n_data))


def described(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


def f32(start: int, stop: int, *shape: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (memoryview(b"\1\2"), "it has 2 bytes"),
        (safetensors_bytes(b"{}", length=1 << 63), "its header claims 9223372036854775808 bytes, more than"),
        (safetensors_bytes(b"{}", length=3), "was cut short: its header claims 3 bytes"),
        (safetensors_bytes(b" {}"), "does not begin with '{'"),
        (safetensors_bytes(b"{]"), "is not JSON"),
        (safetensors_bytes(b"{\xff}"), "is not JSON"),
        (safetensors_bytes(b'{"a":' * 50_000), "is not JSON"),
        (safetensors_bytes(b'{"a":' + b"9" * 5000 + b"}"), "is not JSON"),
        (safetensors_bytes(b'{"a":1,"a":2}'), "a name appears twice"),
        (safetensors_bytes(described(a=1)), "is not described by"),
        (safetensors_bytes(described(a={**f32(0, 4, 1), "more": 1}), 4), "is not described by"),
        (safetensors_bytes(described(a={"dtype": "F5", "shape": [], "data_offsets": [0, 0]})), "unknown type 'F5'"),
        (safetensors_bytes(described(a=f32(0, 4, -1)), 4), "shape or a range that is none"),
        (safetensors_bytes(described(a=f32(0, 4, True)), 4), "shape or a range that is none"),
        (safetensors_bytes(described(a=f32(0, 4, 1.0)), 4), "shape or a range that is none"),
        (safetensors_bytes(described(a=f32(0, 4, *[1] * 9)), 4), "shape or a range that is none"),
        (safetensors_bytes(described(a=f32(0, 4, 1 << 62, 1 << 62)), 4), "takes .* bytes, and its range has 4"),
        (safetensors_bytes(described(a=f32(4, 0)), 4), "takes 4 bytes, and its range has -4"),
        (safetensors_bytes(described(a=f32(4, 8, 1)), 8), "does not begin where the one before it ends"),
        (safetensors_bytes(described(a=f32(0, 8, 2), b=f32(4, 8, 1)), 8), "'b' does not begin where"),
        (safetensors_bytes(described(a=f32(0, 8, 2)), 7), "was cut short: it has .* bytes and should have"),
        (safetensors_bytes(described(a=f32(0, 8, 2)), 9), "1 bytes at its end belong to no tensor"),
        (safetensors_bytes(described(**{"n" * 257: f32(0, 0, 0)})), "name has 257 characters"),
    ],
)  # fmt: skip
def test_a_safetensors_header_that_lies_is_refused(body: memoryview, reason: str) -> None:
    with pytest.raises(HeaderDamaged, match=reason):
        read_safetensors_header(body)


def test_metadata_and_empty_tensors_are_no_lie() -> None:
    header = described(__metadata__={"format": "pt"}, a=f32(0, 4, 1), b=f32(4, 4, 0), c=f32(4, 12, 1, 2)) + b"  "
    entries = read_safetensors_header(safetensors_bytes(header, 12))
    assert [(e.name, e.stop - e.start) for e in entries] == [("a", 4), ("b", 0), ("c", 8)]


def many(piece: bytes, n_bytes: int) -> bytes:
    return b'{"a":[' + piece * ((n_bytes - 10) // len(piece)) + b"0]}"


@pytest.mark.parametrize("piece", [b"0,", b"{},", b"[],", b'"",', b"[[[[", b'{"":', b"1.5,", b"123456789,"])
def test_a_header_of_the_largest_size_takes_bounded_memory(piece: bytes) -> None:
    body = safetensors_bytes(many(piece, MAX_HEADER_BYTES))
    assert grown_mib(body, read_safetensors_header) <= MEMORY_MIB


def array_entry(key: str, kind: int, n_items: int, body: bytes) -> bytes:
    name = key.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, n_items) + body


@pytest.mark.parametrize(
    ("kind", "item"),
    [
        (gguf.GGUFValueType.FLOAT32, b"\x01\x02\x03\x04"),
        (gguf.GGUFValueType.UINT8, b"\x07"),
        (gguf.GGUFValueType.BOOL, b"\x01"),
        (gguf.GGUFValueType.INT64, b"\x01\x02\x03\x04\x05\x06\x07\x08"),
        (gguf.GGUFValueType.STRING, b"\x02" + bytes(7) + b"ab"),
    ],
)
def test_arrays_as_large_as_allowed_take_bounded_memory(kind: int, item: bytes) -> None:
    """Ten arrays, together far more than is allowed: it is refused when the limit is reached."""
    n_items = 200_000
    entries = [array_entry(f"a{i}", kind, n_items, item * n_items) for i in range(10)]
    body = memoryview(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    assert grown_mib(body, read_header) <= MEMORY_MIB
    with pytest.raises(HeaderDamaged, match=r"is damaged: (it claims 200000 items|its metadata takes more)"):
        read_header(body)


def grown_mib(body: memoryview, read: Callable[[memoryview], object]) -> float:
    """Peak memory of Python objects while a header is read; it is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(HeaderDamaged):
            read(body)
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def test_a_gguf_name_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 257) + b"k" * 257 + bytes(40))
    with pytest.raises(ModelInvalid, match="a metadata key claims 257 bytes, more than the limit of 256"):
        open_gguf(path)
