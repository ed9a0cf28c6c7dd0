"""A path is never fetched: what is wrong with it is said as the other commands say it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.drills import model as drills_model
from kvferry.drills.errors import ModelUnavailable, ModelUnusable
from kvferry.drills.model import ensure_model, is_path

KVFERRY = [sys.executable, "-m", "kvferry.client.cli"]


@pytest.fixture
def bad(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    path = tmp_path / "model"
    match request.param:
        case "empty folder":
            path.mkdir()
        case "folder with a broken config":
            path.mkdir()
            (path / "config.json").write_text("{")
        case "not a model":
            path.write_bytes(bytes(5000))
        case "empty file":
            path.touch()
        case "cut":
            path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (9).to_bytes(8, "little") + bytes(8))
        case "nothing there":
            return str(tmp_path / "none.gguf")
    return str(path)


KINDS = ["empty folder", "folder with a broken config", "not a model", "empty file", "cut", "nothing there"]


@pytest.mark.parametrize("bad", KINDS, indirect=True)
def test_up_says_of_a_bad_path_what_the_coordinator_says(bad, tmp_path):
    def run(*command: str) -> tuple[int, str]:
        ran = subprocess.run([*KVFERRY, *command], capture_output=True, text=True, timeout=60, check=False)
        return ran.returncode, ran.stderr

    said = run("up", "--model", bad, "--dir", str(tmp_path / "up"), "--port", "0")
    listen, state = ("--listen", "127.0.0.1:0"), ("--state", str(tmp_path / "s"))
    code, sentence = run("coordinator", "run", "--model", bad, *listen, *state)
    assert said[0] == code
    assert code in {3, 4, 5}
    if "weights are missing" not in said[1]:  # a folder may lack several things; each command names what it needs first
        assert said[1] == sentence
    assert said[1].startswith("error: ")
    assert said[1].count("\n") == 1
    assert bad in said[1]


def test_a_name_that_cannot_be_fetched(monkeypatch):
    monkeypatch.setattr(drills_model, "_kvferry", lambda *a: subprocess.CompletedProcess(a, 3, "[]", "error: no"))
    monkeypatch.setattr(drills_model.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 6))
    with pytest.raises(ModelUnavailable, match="smollm9"):
        ensure_model("smollm9")
    with pytest.raises(ModelUnusable, match="no"):
        ensure_model("./smollm9")


def test_a_slow_line_takes_its_time_and_a_disk_that_does_not_answer_is_one_sentence(monkeypatch):
    def run(argv, timeout=None, **_):
        if timeout is not None and argv[4] != "list":
            raise subprocess.TimeoutExpired(argv, timeout)
        return subprocess.CompletedProcess(argv, 0 if argv[4] in {"list", "fetch"} else 3, "[]", "")

    monkeypatch.setattr(drills_model.subprocess, "run", run)
    with pytest.raises(ModelUnavailable, match="does the disk answer"):
        ensure_model("smollm9")
    monkeypatch.setattr(drills_model, "_kvferry", lambda *a: subprocess.CompletedProcess(a, 3, "[]", "error: no"))
    ensure_model("smollm9")


@pytest.mark.parametrize(
    ("model", "yes"),
    [("smollm2-135m", False), ("ORG/NAME", False), ("/x", True), ("./x", True), ("~/x", True), ("x.gguf", True)],
)
def test_what_is_meant_as_a_path(model, yes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_path(model) is yes
    (tmp_path / "x").touch()
    assert is_path("x")
