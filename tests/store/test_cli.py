"""`kvferry kv`: what a person sees, what a program reads, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf import GGUFWriter
from safetensors.numpy import load, load_file

from kvferry.store.cli import kv
from kvferry.store.errors import EXIT_CODES, SnapshotRejected, StoreError, StoreMisuse
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.model_shape import parse_shape, read_shape

GOLDEN = Path(__file__).parents[1] / "golden" / "vlkv"
MANIFEST: dict[str, Any] = json.loads((GOLDEN / "manifest.json").read_text())
MALFORMED = {case["tag"]: GOLDEN / case["file"] for case in MANIFEST["malformed"]}
GOOD_72 = str(GOLDEN / "good" / "kv_f22c327f09615fa0.kv")
MODEL = ["--geometry", "3,2,64", "--vocab", "1024"]


def _run(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(kv, [str(argument) for argument in arguments], input=stdin)


def _json(*arguments: str | Path) -> Any:
    return json.loads(_run(*arguments, "--json").output)


def test_inspect_shows_every_field_with_offset_and_bytes() -> None:
    result = _run("inspect", GOOD_72)
    assert result.exit_code == 0
    for shown in ("0-3 ", "56 4b 4c 56", "'VKLV'", "24-27", "48 00 00 00", "file_n_tokens", "72", "44-63", "all zero"):
        assert shown in result.output
    assert "header f22c327f09615fa0, of the ids f22c327f09615fa0" in result.output
    assert "actual 221536, expected 221536" in result.output
    assert "verdict     ok" in result.output


def test_inspect_as_json_holds_all_64_bytes() -> None:
    found = _json("inspect", GOOD_72)
    assert "".join(field["hex"] for field in found["fields"]) == MANIFEST["good"][-1]["first64"]
    assert found["token_hash"] == {"header": "f22c327f09615fa0", "computed": "f22c327f09615fa0"}
    assert found["size"] == {"actual": 221536, "expected": 221536}
    assert (found["verdict"], found["exit_code"]) == ("ok", 0)


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("case", MANIFEST["malformed"], ids=lambda case: case["tag"])
def test_a_malformed_file_ends_with_the_exit_code_of_its_reason(case: dict[str, Any], command: str) -> None:
    result = _run(command, GOLDEN / case["file"], *MODEL)
    if case["expect"] == "accept_undetectable":
        assert result.exit_code == 0
        return
    reason = case["reference_reader"].removeprefix("refuse:")
    if case["tag"] == "version_2":  # the commands read version 2 as well, and its rows take another size
        reason = "size_mismatch"
    assert reason in result.output
    assert result.exit_code == EXIT_CODES[reason]
    assert _json(command, GOLDEN / case["file"], *MODEL)["reason"] == reason


def test_inspect_shows_both_hashes_and_both_sizes_of_a_bad_file() -> None:
    assert _json("inspect", MALFORMED["hash_zero"])["token_hash"] == {
        "header": "0" * 16,
        "computed": "5fce35c90480ab16",
    }
    assert _json("inspect", MALFORMED["trailing_1"])["size"] == {"actual": 101573, "expected": 101572}
    absurd = _json("inspect", MALFORMED["n_tokens_ffffffff"])
    assert absurd["token_hash"]["computed"] is None
    assert absurd["size"]["expected"] == 64 + 0xFFFFFFFF * 3076


def test_verify_counts_what_version_1_cannot_refuse() -> None:
    assert _json("verify", MALFORMED["payload_nan"])["n_not_finite"] == 1
    assert "1 values are not finite" in _run("verify", MALFORMED["payload_nan"]).output
    assert _json("verify", GOOD_72, *MODEL)["n_tokens"] == 72


def test_verify_without_a_model_takes_another_models_file() -> None:
    assert _run("verify", MALFORMED["foreign_layers"]).exit_code == 0
    assert _run("verify", MALFORMED["foreign_layers"], *MODEL).exit_code == EXIT_CODES["geometry_mismatch:n_layers"]


def test_dump_writes_the_oracles_rows(tmp_path: Path, golden_rows: MemoryRows, golden_ids: np.ndarray) -> None:
    output = tmp_path / "rows.safetensors"
    assert _run("dump", GOOD_72, "--output", output, *MODEL).exit_code == 0
    arrays = load_file(output)
    assert set(arrays) == {"token_ids", "k", "v"}
    assert arrays["token_ids"].dtype == np.int32
    assert arrays["k"].dtype == arrays["v"].dtype == np.float32
    assert np.array_equal(arrays["token_ids"], golden_ids)
    assert arrays["k"].tobytes() == golden_rows.k.tobytes()
    assert arrays["v"].tobytes() == golden_rows.v.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_dump_of_a_refused_file_writes_nothing(tmp_path: Path) -> None:
    result = _run("dump", MALFORMED["tokens_tampered"], "--output", tmp_path / "rows.safetensors")
    assert isinstance(result.exception, SnapshotRejected)
    assert result.exception.exit_code == EXIT_CODES["token_hash_mismatch"]
    assert not list(tmp_path.iterdir())


def test_dump_says_when_it_cannot_write(tmp_path: Path) -> None:
    result = _run("dump", GOOD_72, "--output", tmp_path / "nowhere" / "rows.safetensors")
    assert isinstance(result.exception, StoreError)
    assert "cannot write" in str(result.exception)


def test_dump_into_a_pipe_leaves_the_pipe(tmp_path: Path, golden_ids: np.ndarray) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert _run("dump", GOOD_72, "--output", pipe, *MODEL).exit_code == 0
    reader.join(10)
    assert np.array_equal(load(read[0])["token_ids"], golden_ids)
    assert pipe.is_fifo()


def test_ls_lists_a_store_and_a_models_directory(tmp_path: Path) -> None:
    folder = tmp_path / "feed"
    shutil.copytree(GOLDEN / "good", folder)
    shutil.copy(MALFORMED["fmt_9"], folder / "kv_00000000000000aa.kv")
    (folder / "notes.txt").write_text("not a snapshot")
    for directory in (tmp_path, folder):
        listed = _json("ls", directory)
        status = {Path(line["file"]).name: line["status"] for line in listed["snapshots"]}
        assert status.pop("kv_00000000000000aa.kv") == "refused: bad_fmt"
        assert status == {Path(case["file"]).name: "ok" for case in MANIFEST["good"]}
        tokens = {Path(line["file"]).name: line["n_tokens"] for line in listed["snapshots"]}
        assert tokens["kv_f22c327f09615fa0.kv"] == 72
    assert "6 snapshots" in _run("ls", tmp_path).output
    foreign = _json("ls", folder, "--geometry", "4,2,64")
    assert {line["status"] for line in foreign["snapshots"]} == {
        "refused: geometry_mismatch:n_layers",
        "refused: bad_fmt",
    }


def test_ls_of_an_empty_store_is_no_error(tmp_path: Path) -> None:
    result = _run("ls", tmp_path)
    assert (result.exit_code, result.output) == (0, "0 snapshots, 0 bytes\n")


@pytest.mark.parametrize("case", MANIFEST["lookups"], ids=lambda case: case["tag"])
def test_lcp_finds_the_manifests_best_file(case: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(case["request_ids"]))
    found = _json("lcp", GOLDEN / "good", "--tokens", f"@{tmp_path / 'ids.json'}", "--min-tokens", "1")
    assert found["n_common"] == case["per_file"]
    assert found["n_usable_rows"] == case["rows_usable"]
    assert (found["best"] or {"file": None})["file"] == case["shortest_file_with_that_lcp"]


def test_lcp_takes_tokens_in_any_of_its_forms() -> None:
    ids = MANIFEST["token_ids"][:20]
    for text in (" ".join(map(str, ids)), ",".join(map(str, ids)), json.dumps(ids)):
        assert "20 of 20 tokens, 19 rows usable" in _run("lcp", GOLDEN / "good", "--tokens", text).output
        assert "20 of 20" in _run("lcp", GOLDEN / "good", "--tokens", "-", stdin=text).output
    assert "none shares 16 tokens" in _run("lcp", GOLDEN / "good", "--tokens", "157 781").output


@pytest.mark.parametrize(
    "tokens",
    ["", "a b", "[1, [2]]", "1.5", "99999999999", "[]", "{}", "-1,2", "1,,2", "1,2,", ",1", "[-1]", "[1.5]", "[true]"],
)
def test_tokens_that_are_none_are_said_in_one_sentence(tokens: str) -> None:
    result = _run("lcp", GOLDEN / "good", "--tokens", tokens)
    assert isinstance(result.exception, StoreMisuse)
    assert "token ids" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ls", "/nowhere"], "there is no directory /nowhere"),
        (["ls", GOOD_72], "is a file where a directory is needed"),
        (["lcp", "/nowhere", "--tokens", "1"], "there is no directory /nowhere"),
        (["inspect", "/nowhere/kv_0123456789abcdef.kv"], "there is no snapshot /nowhere"),
        (["inspect", str(GOLDEN)], "not a regular file"),
        (["verify", GOOD_72, "--geometry", "3,2"], "is no geometry"),
        (["verify", GOOD_72, "--model", "/nowhere"], "there is no model '/nowhere'"),
    ],
)
def test_wrong_arguments_are_said_in_one_sentence(arguments: list[str], sentence: str) -> None:
    result = _run(*arguments)
    assert isinstance(result.exception, StoreError)
    assert sentence in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.exception.exit_code >= 10


def test_a_model_and_a_geometry_together_are_wrong_usage() -> None:
    assert _run("verify", GOOD_72, "--geometry", "3,2,64", "--model", "x").exit_code == 2
    assert _run("verify", GOOD_72, "--vocab", "7").exit_code == 2


# --- where --model gets the geometry from


def test_a_geometry_is_read_from_text() -> None:
    assert parse_shape("28,8,128", 151_936).geometry == KvGeometry(28, 8, 128, 32)
    assert parse_shape("28,8,128,16", None).geometry == KvGeometry(28, 8, 128, 16)


@pytest.mark.parametrize(
    ("config", "geometry", "vocab_size"),
    [
        (
            {
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 9,
            },
            KvGeometry(28, 8, 128),
            9,
        ),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, KvGeometry(2, 4, 16), None),
        (
            {"text_config": {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 5}},
            KvGeometry(3, 2, 4),
            5,
        ),
    ],
)
def test_a_geometry_is_read_from_a_config(
    config: dict[str, Any], geometry: KvGeometry, vocab_size: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_shape(str(tmp_path))
    assert (found.geometry, found.vocab_size) == (geometry, vocab_size)


def test_a_geometry_is_read_from_a_gguf_by_path_and_by_fetched_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "models" / "ORG--tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(30)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_embedding_length(576)
    writer.add_token_list([b"a", b"b", b"c"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    for model in (str(path), str(path.parent), "ORG/tiny"):
        found = read_shape(model)
        assert (found.geometry, found.vocab_size) == (KvGeometry(30, 3, 64), 3)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{}"),
        ("config.json", b"[]"),
        ("config.json", b"\xff"),
        ("config.json", b'{"num_hidden_layers": 1, "num_attention_heads": 0, "hidden_size": 8}'),
        ("m.gguf", b"GG"),
        ("m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 0)),
        ("m.gguf", bytes(100)),
    ],
)
def test_a_model_that_tells_no_geometry_is_said_in_one_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StoreMisuse, match="give it with --geometry") as caught:
        read_shape(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_format_document_lists_every_refusal_with_its_exit_code() -> None:
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    listed = {reason: int(code) for reason, code in re.findall(r"\| `([a-z_:]+)` \| (\d+) \|", document)}
    assert listed == EXIT_CODES
