"""A GGUF file is read as its own library reads it, and refused in one sentence when it is damaged."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.engine.errors import EngineError, ModelInvalid, ModelNotFound, UnsupportedArchitecture
from kvferry.engine.files.gguf_file import GgufFile, open_gguf

WriteGguf = Callable[..., Path]


def assert_same_as_library(path: Path) -> GgufFile:
    ours, library = open_gguf(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in library.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == theirs
    assert list(ours.tensors) == [tensor.name for tensor in library.tensors]
    for tensor in library.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type.name.lower()
        assert mine.shape == ((1, *reversed(tensor.shape.tolist()))[-2:])
        assert np.array_equal(mine.data.reshape(-1), tensor.data.reshape(-1).view(np.uint8))
    return ours


def test_the_real_model_is_read_as_the_format_s_own_library_reads_it(smollm2_path: Path) -> None:
    config = assert_same_as_library(smollm2_path).config
    assert config.as_dict() == {
        "architecture": "llama",
        "n_layers": 30,
        "hidden_size": 576,
        "n_heads": 9,
        "n_kv_heads": 3,
        "head_dim": 64,
        "ffn_size": 1536,
        "vocab_size": 49152,
        "context_length": 8192,
        "rope_theta": 100000.0,
        "rms_eps": pytest.approx(1e-5, rel=1e-6),
        "tied_embeddings": True,
        "rope_adjacent_pairs": True,
        "end_token_ids": [2],
    }
    assert config.kv_dim == 192


def test_a_small_file_is_read_the_same_way_and_its_tensors_cannot_be_written(
    tmp_path: Path, write_gguf: WriteGguf
) -> None:
    file = assert_same_as_library(write_gguf(tmp_path / "m.gguf"))
    up = file.tensors["blk.0.ffn_up.weight"]
    assert (up.shape, up.kind, up.data.shape) == ((64, 32), "q8_0", (64, 34))
    assert file.tensors["output_norm.weight"].shape == (1, 32)
    with pytest.raises(ValueError, match="read-only"):
        up.data[0, 0] = 1


def test_a_file_cut_anywhere_is_refused_in_one_sentence(tmp_path: Path, write_gguf: WriteGguf) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for n_bytes in [*range(0, 1200, 7), *range(1200, len(whole) - 128, 211), len(whole) // 2]:
        cut.write_bytes(whole[:n_bytes])
        with pytest.raises(ModelInvalid, match=r"cut\.gguf") as caught:
            open_gguf(cut)
        assert "\n" not in str(caught.value)
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelInvalid, match=r"was cut short: it has \d+ bytes, and tensor .* would end at byte \d+"):
        open_gguf(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 255)), min_size=1, max_size=8))
def test_no_damage_to_the_header_gives_anything_but_a_declared_error(
    tmp_path: Path, write_gguf: WriteGguf, damage: list[tuple[int, int]]
) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_gguf(path)
        (tmp_path / "good").write_bytes(path.read_bytes())
    body = bytearray((tmp_path / "good").read_bytes())
    for place, value in damage:
        body[place] = value
    path.unlink()  # an earlier example may still map the old bytes
    path.write_bytes(body)
    sentence = str(path)
    try:
        assert open_gguf(path).config.n_layers >= 1
    except EngineError as error:
        sentence = str(error)
    assert str(path) in sentence


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, b"GGML", "does not begin with the letters GGUF"),
        (4, struct.pack(">I", 3), "big-endian"),
        (4, struct.pack("<I", 9), "its version is 9"),
        (8, struct.pack("<Q", 1 << 62), "claims 4611686018427387904 tensors"),
        (8, struct.pack("<Q", 50_000), "claims 50000 tensors and ends before they could fit"),
        (16, struct.pack("<Q", 1 << 40), "claims 1099511627776 metadata entries"),
        (24, struct.pack("<Q", 1 << 40), "a metadata key claims 1099511627776 bytes"),
        (24, struct.pack("<Q", 1 << 20), "a metadata key claims 1048576 bytes, more than the limit of 256"),
        (32, b"\xff\xfe", "a metadata key is not UTF-8"),
    ],
)
def test_an_absurd_header_is_refused_by_name(
    tmp_path: Path, write_gguf: WriteGguf, place: int, value: bytes, reason: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    body = bytearray(path.read_bytes())
    body[place : place + len(value)] = value
    path.write_bytes(body)
    with pytest.raises(ModelInvalid, match=reason):
        open_gguf(path)


@pytest.mark.parametrize(
    ("offset", "reason"), [(1 << 50, "would end at byte"), (4, "multiple of 32"), (0, "overlaps another")]
)
def test_a_tensor_outside_the_file_or_over_another_is_refused(
    tmp_path: Path, write_gguf: WriteGguf, offset: int, reason: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    body = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    # name, number of dimensions (4 bytes), two dimensions (8 each), kind (4), then the offset
    place = body.index(name) + len(name) + 4 + 16 + 4
    body[place : place + 8] = struct.pack("<Q", offset)
    path.write_bytes(body)
    with pytest.raises(ModelInvalid, match=reason):
        open_gguf(path)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"block_count": 0}, ModelInvalid, "n_layers is 0"),
        ({"embedding_length": "many"}, ModelInvalid, "is of type str, expected int"),
        ({"attention.head_count": 0}, ModelInvalid, "n_heads is 0"),
        ({"attention.head_count_kv": 3}, ModelInvalid, "must be a multiple"),
        ({"attention.key_length": 7}, ModelInvalid, "must be even"),
        ({"rope.freq_base": float("inf")}, ModelInvalid, "rope_theta is inf"),
        ({"context_length": None}, ModelInvalid, "'llama.context_length' is missing"),
        ({"rope.scaling.type": "longrope"}, UnsupportedArchitecture, "rope scaling 'longrope'"),
        ({"rope.scaling.type": "yarn"}, ModelInvalid, "'llama.rope.scaling.factor' is missing"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": -1.0}, ModelInvalid, "scaled by -1.0"),
        ({"rope.dimension_count": 4}, UnsupportedArchitecture, "heads of 8 with rope over 4"),
        ({"architecture": "mamba"}, UnsupportedArchitecture, "'mamba' is not supported.*llama"),
    ],
)
def test_a_shape_that_cannot_be_run_is_refused_by_name(
    tmp_path: Path, write_gguf: WriteGguf, changes: dict[str, object], error: type[EngineError], reason: str
) -> None:
    architecture = str(changes.pop("architecture", "llama"))
    file = open_gguf(write_gguf(tmp_path / "m.gguf", architecture, **changes))
    with pytest.raises(error, match=reason) as caught:
        _ = file.config
    assert "m.gguf" in str(caught.value)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path, write_gguf: WriteGguf) -> None:
    with pytest.raises(UnsupportedArchitecture, match="split over several files"):
        open_gguf(write_gguf(tmp_path / "m.gguf", **{"split.count": 3}))


def test_a_folder_or_nothing_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelInvalid, match="is a folder, not a GGUF file"):
        open_gguf(tmp_path)
