"""`kvferry score` refuses what it cannot do in one sentence, before it reads a weight, with an exit code of its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvferry.engine.commands import score_files
from kvferry.engine.commands.score import score
from kvferry.engine.engine import Engine
from kvferry.engine.errors import EngineError, OutOfResources, OutputUnwritable
from kvferry.engine.reference import ReferenceModel
from kvferry.engine.selftest import self_test

TOKENS = np.array([1, 50, 35, 28, 26, 32, 31], np.int32)
Arrays = dict[str, np.ndarray]


@pytest.fixture
def model(recorded: Callable[[str], Path]) -> Path:
    return recorded("qwen3_untied_f32") / "model"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file({"input_ids": TOKENS}, tmp_path / "in.st")
    return tmp_path / "in.st"


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded before a request is refused fails the test."""

    def load(*_: object) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(ReferenceModel, "load", load)


def run(model: Path, source: Path, output: Path, *options: str) -> None:
    arguments = ["--model", str(model), "--input", str(source), "--output", str(output), *options]
    score.main(arguments, standalone_mode=False)


def refused(model: Path, source: Path, output: Path, *options: str) -> EngineError:
    with pytest.raises(EngineError) as caught:
        run(model, source, output, *options)
    assert "\n" not in str(caught.value)
    return caught.value


def raw_safetensors(path: Path, dtype: str, item_bytes: int, arrays: Arrays | None = None) -> Path:
    """A file with input_ids in a type that numpy has not, or with such a tensor beside proper ones."""
    header: dict[str, object] = {}
    body = b""
    for name, array in (arrays or {}).items():
        header[name] = {
            "dtype": "I32",
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + array.nbytes],
        }
        body += array.tobytes()
    name = "scale" if arrays else "input_ids"
    header[name] = {"dtype": dtype, "shape": [4], "data_offsets": [len(body), len(body) + 4 * item_bytes]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body + bytes(4 * item_bytes))
    return path


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("way", [(), ("--reference",)], ids=["engine", "reference"])
@pytest.mark.parametrize(
    ("arrays", "options", "exit_code", "sentence"),
    [
        ({"input_ids": np.array([1, 2, 10**6], np.int32)}, (), 12, r"token ids lie in 0 \.\. \d+; token 2 is 1000000"),
        ({"input_ids": np.array([1, -2], np.int32)}, (), 12, "token 1 is -2"),
        ({"input_ids": np.ones(10**6, np.int32)}, (), 8, "1000000 tokens are more than the context of"),
        ({"input_ids": TOKENS}, ("--greedy", "99999999999"), 8, "and 99999999999 to continue with are more than"),
        ({"input_ids": TOKENS.astype(np.int64)}, (), 12, "input_ids is I64 of shape .7., expected I32"),
        ({"input_ids": TOKENS[None]}, (), 12, "in 1 dimension"),
        ({"input_ids": TOKENS, "pixel_values": np.ones((4, 8), np.float32)}, (), 12, "together"),
        (
            {
                "input_ids": TOKENS,
                "pixel_values": np.ones((4, 8), np.float32),
                "image_grid_thw": np.ones((1, 3), np.int64),
            },
            (),
            5,
            "takes no images",
        ),
    ],
)
def test_what_the_model_cannot_take_is_refused_before_it_is_loaded(
    model: Path,
    tmp_path: Path,
    way: tuple[str, ...],
    arrays: Arrays,
    options: tuple[str, ...],
    exit_code: int,
    sentence: str,
) -> None:
    save_file(arrays, tmp_path / "in.st")
    error = refused(model, tmp_path / "in.st", tmp_path / "out.st", *way, *options)
    assert error.exit_code == exit_code
    with pytest.raises(EngineError, match=sentence):
        raise error


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.update(pixel_values=arrays["pixel_values"][:-1].copy()),
        lambda arrays: arrays.update(image_grid_thw=arrays["image_grid_thw"] * 2),
        lambda arrays: arrays.update(image_grid_thw=-arrays["image_grid_thw"]),
        lambda arrays: arrays.update(input_ids=TOKENS),
    ],
    ids=["a patch short", "other grids", "negative grids", "no image tokens"],
)
def test_images_that_do_not_fit_are_refused_before_the_model_is_loaded(
    recorded: Callable[[str], Path], tmp_path: Path, change: Callable[[Arrays], None]
) -> None:
    folder = recorded("qwen3vlmoe_bf16")
    golden = load_file(folder / "golden.safetensors")
    arrays = {name: golden[f"img1.{name}"] for name in ("input_ids", "pixel_values", "image_grid_thw")}
    change(arrays)
    save_file(arrays, tmp_path / "in.st")
    assert refused(folder / "model", tmp_path / "in.st", tmp_path / "out.st").exit_code == 12


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(("dtype", "item_bytes"), [("BF16", 2), ("F8_E4M3", 1)])
def test_tokens_in_a_type_that_numpy_has_not_are_refused(
    model: Path, tmp_path: Path, dtype: str, item_bytes: int
) -> None:
    source = raw_safetensors(tmp_path / "in.st", dtype, item_bytes)
    assert f"input_ids is {dtype}" in str(refused(model, source, tmp_path / "out.st"))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_a_tensor_that_is_not_asked_for_is_not_looked_at(model: Path, tmp_path: Path, dtype: str) -> None:
    source = raw_safetensors(tmp_path / "in.st", dtype, 1, {"input_ids": TOKENS})
    run(model, source, tmp_path / "out.st")
    assert load_file(tmp_path / "out.st")["logits"].shape[0] == len(TOKENS)


@pytest.mark.usefixtures("nothing_loads")
def test_an_input_or_an_image_that_is_no_file_is_refused_and_not_waited_for(
    model: Path, source: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("no tensors")
    for place, sentence in [
        ("pipe", "is a pipe"),
        ("none", "does not exist"),
        (".", "is a folder"),
        ("text", "cannot"),
    ]:
        assert sentence in str(refused(model, tmp_path / place, tmp_path / "out.st"))
    for place, sentence in [("pipe", "is a pipe"), ("none", "does not exist"), (".", "is a folder")]:
        assert sentence in str(refused(model, source, tmp_path / "out.st", "--image", str(tmp_path / place)))
    assert refused(model, source, tmp_path / "out.st", "--image", str(tmp_path / "pipe")).exit_code == 9


@pytest.mark.usefixtures("nothing_loads")
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_computed(
    model: Path, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    for place, sentence in [
        (tmp_path / "none" / "o.st", "there is no folder"),
        (tmp_path / "file" / "o.st", "there is no folder"),
        (tmp_path, "is a folder"),
        (Path("/proc/x"), "cannot be written"),
        (tmp_path / "loop", "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be reached|cannot be written"),
    ]:
        error = refused(model, source, place)
        assert error.exit_code == 10
        with pytest.raises(OutputUnwritable, match=sentence):
            raise error


@pytest.mark.usefixtures("nothing_loads")
def test_a_disk_without_room_for_the_results_is_said_so_with_figures(
    model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=1 << 30, used=1 << 30, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutputUnwritable, match=r"takes \d+ bytes, and its disk has 1000 free"):
        raise refused(model, source, tmp_path / "out.st")
    assert [path.name for path in tmp_path.iterdir()] == ["in.st"]


def test_the_bytes_that_are_asked_for_are_those_that_are_written(model: Path, source: Path, tmp_path: Path) -> None:
    asked: list[int] = []
    check = score_files.check_output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvferry.engine.commands.score.check_output", lambda path, n: (asked.append(n), check(path, n)))
        run(model, source, tmp_path / "out.st", "--greedy", "3")
    assert asked == [sum(array.nbytes for array in load_file(tmp_path / "out.st").values())]


def test_a_disk_that_fills_meanwhile_leaves_the_old_output(
    model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.st").write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(score_files, "save_file", full)
    assert "No space left on device" in str(refused(model, source, tmp_path / "out.st"))
    assert (tmp_path / "out.st").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.st", "out.st"]


def test_an_output_that_is_a_link_is_written_where_it_points(model: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out.st")
    run(model, source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert "logits" in load_file(tmp_path / "out.st")


@pytest.mark.parametrize("by", ["its name", "a link", "a descriptor"])
def test_an_output_that_is_a_pipe_is_written_into(model: Path, source: Path, tmp_path: Path, by: str) -> None:
    """A descriptor is what a shell gives for ``--output >(command)``."""
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    with pipe.open("wb") as opened:
        places = {"its name": pipe, "a link": tmp_path / "link", "a descriptor": Path(f"/dev/fd/{opened.fileno()}")}
        run(model, source, places[by])
    reader.join(10)
    run(model, source, tmp_path / "out.st")
    assert (read, pipe.is_fifo()) == ([(tmp_path / "out.st").read_bytes()], True)
    run(model, source, Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_a_pipe_whose_reader_leaves_is_one_sentence(
    model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    save = score_files.save

    def save_as_it_leaves(*what: object) -> bytes:
        os.close(read_end)
        return save(*what)

    monkeypatch.setattr(score_files, "save", save_as_it_leaves)
    assert "could not be written: Broken pipe" in str(refused(model, source, Path(f"/dev/fd/{write_end}")))
    os.close(write_end)


def test_memory_that_is_not_there_is_one_sentence(
    model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Engine, "load", load)
    assert "there is not enough memory" in str(refused(model, source, tmp_path / "out.st"))


def test_more_threads_than_any_machine_has_are_wrong_usage(model: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="1<=x<=1024"):
        run(model, source, tmp_path / "out.st", "--threads", "100000")


def test_threads_that_the_system_refuses_are_one_sentence_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("kvferry-engine"):
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(OutOfResources, match="gave 3 of the engine's 8 threads"):
        self_test(8)
    assert not [thread for thread in started if thread.is_alive()]
