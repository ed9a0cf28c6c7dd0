"""A GGUF file and the checkpoint it was made of are the same model: the same shape, the same rows by the same names."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvferry.engine.errors import EngineError, ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.gguf_file import open_gguf
from kvferry.engine.files.open_model import open_model

MODELS = [
    "llama_tied_bf16",
    "qwen2_bias_f32",
    "qwen3_untied_f32",
    "qwen3moe_bf16_sharded",
    "qwen3moe_mixed_f32",
    "qwen3moe_nonorm_f32",
    "qwen3vl_tied_bf16",
    "qwen3vlmoe_bf16",
]
Recorded = Callable[[str], Path]
WriteTwin = Callable[..., Path]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model(name: str, recorded: Recorded, write_twin: WriteTwin, tmp_path: Path) -> None:
    folder = recorded(name) / "model"
    ours, theirs = open_model(write_twin(folder, tmp_path / "model.gguf")), open_model(folder)
    assert list(ours.tensors) == list(theirs.tensors)
    for tensor in theirs.tensors:
        assert ours.tensors[tensor].shape == theirs.tensors[tensor].shape
        assert np.array_equal(ours.tensors[tensor].read(), theirs.tensors[tensor].read()), tensor
    # A GGUF file has float32 figures, and does not say how an image is scaled.
    one, other = ours.config, theirs.config
    assert one.rms_eps == pytest.approx(other.rms_eps, rel=1e-6)
    assert one.rope_adjacent_pairs == (other.architecture == "llama")
    vision = other.vision
    if vision is not None and one.vision is not None:
        assert one.vision.norm_eps == pytest.approx(vision.norm_eps, rel=1e-6)
        vision = dataclasses.replace(vision, image=one.vision.image, norm_eps=one.vision.norm_eps)
    assert one == dataclasses.replace(
        other, rms_eps=one.rms_eps, rope_adjacent_pairs=one.rope_adjacent_pairs, vision=vision
    )


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "f16", "bf16"])
def test_rows_in_blocks_are_given_as_stored_and_as_numbers(
    kind: str, recorded: Recorded, write_twin: WriteTwin, tmp_path: Path
) -> None:
    folder = recorded("qwen3moe_nonorm_f32") / "model"
    ours, exact = open_model(write_twin(folder, tmp_path / "m.gguf", kind)), open_model(folder)
    library_kind = gguf.GGMLQuantizationType[kind.upper()]
    for name, tensor in ours.tensors.items():
        if tensor.kind == "f32":
            continue
        blocks = gguf.quants.quantize(exact.tensors[name].read(), library_kind)
        stored = tensor.stored()
        assert stored is not None
        assert np.array_equal(stored, blocks.view(np.uint8).reshape(stored.shape))
        assert np.array_equal(tensor.read(3, 7), tensor.read()[3:7])
        assert np.array_equal(tensor.read(), gguf.quants.dequantize(blocks, library_kind))


def test_a_llama_s_rows_are_put_back_in_order_range_by_range(recorded: Recorded, smollm2_path: Path) -> None:
    model, raw = open_model(smollm2_path), open_gguf(smollm2_path)
    q, stored = model.tensors["layers.3.attn_q"], raw.tensors["blk.3.attn_q.weight"].data
    assert (q.shape, q.kind) == ((576, 576), "q4_1")
    # Row i of a head is source row 2 i; row i + 32 is source row 2 i + 1.
    for row, source in ((0, 0), (1, 2), (31, 62), (32, 1), (63, 63), (64, 64), (65, 66)):
        own = q.stored(row, row + 1)
        assert own is not None
        assert np.array_equal(own[0], stored[source])
    assert np.array_equal(q.read(30, 70), q.read()[30:70])


def test_a_model_that_sees_without_its_mmproj_takes_text_only(
    recorded: Recorded, write_twin: WriteTwin, tmp_path: Path
) -> None:
    path = write_twin(recorded("qwen3vlmoe_bf16") / "model", tmp_path / "m.gguf")
    mmproj = tmp_path / "mmproj-m.gguf"
    assert open_model(path).config.vision is not None
    assert open_model(path).weight_files == (path, mmproj)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = elsewhere / "x.gguf"
    shutil.move(mmproj, moved)
    alone = open_model(path)
    assert alone.config.vision is None
    assert alone.config.mrope_section == (6, 5, 5)
    assert open_model(path, vision_path=moved).config.vision is not None
    for copy in ("mmproj-a.gguf", "mmproj-b.gguf"):
        shutil.copy(moved, tmp_path / copy)
    with pytest.raises(ModelInvalid, match=r"several mmproj files \(mmproj-a.gguf, mmproj-b.gguf\)"):
        open_model(path)


def test_the_mmproj_of_another_model_is_refused(recorded: Recorded, write_twin: WriteTwin, tmp_path: Path) -> None:
    path = write_twin(recorded("qwen3vlmoe_bf16") / "model", tmp_path / "m.gguf")
    with pytest.raises(UnsupportedArchitecture, match="projector 'none' is not supported"):
        open_model(path, vision_path=path)
    with pytest.raises(UnsupportedArchitecture, match="architecture 'clip' is not supported; supported in GGUF"):
        open_model(tmp_path / "mmproj-m.gguf")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"blk.1.attn_q_norm.weight", b"blk.1.attn_x_norm.weight", "tensor 'blk.1.attn_q_norm.weight' is missing"),
        (b"qwen3.block_count\x04\0\0\0\x02", b"qwen3.block_count\x04\0\0\0\x01", "holds tensor 'blk.1."),
        (b"qwen3.block_count\x04\0\0\0\x02", b"qwen3.block_count\x04\0\0\0\x03", "tensor 'blk.2..* is missing"),
        (b"qwen3.feed_forward_length\x04\0\0\0\0\x01", b"qwen3.feed_forward_length\x04\0\0\0\x20\x01", "asks for"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(
    old: bytes, new: bytes, reason: str, recorded: Recorded, write_twin: WriteTwin, tmp_path: Path
) -> None:
    path = write_twin(recorded("qwen3_untied_f32") / "model", tmp_path / "m.gguf")
    body = path.read_bytes()
    assert body.count(old) == 1
    path.unlink()
    path.write_bytes(body.replace(old, new))
    with pytest.raises(EngineError, match=reason) as caught:
        open_model(path)
    assert "m.gguf" in str(caught.value)
