"""What people get wrong: one sentence, the right status and exit code, and the cluster serves on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.client.errors import EmptyPrompt, InvalidName, InvalidSampling, PromptTooLong, UnknownSession
from kvferry.client.sdk import Client, Sampling
from kvferry.drills.conversation import hold_turn

from .rig import question


def kvferry(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry.client.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def still_serves(cluster, control):
    """After each mistake."""
    yield
    with Client(cluster.address) as client:
        session = client.create_session()
        log = hold_turn(session, question(0, max_tokens=8))
        control.assert_same([question(0, max_tokens=8)], [log.record], session)
        session.delete()


@pytest.mark.parametrize(
    ("text", "sampling", "error", "sentence"),
    [
        ("", Sampling(), EmptyPrompt, "the prompt is empty"),
        ("  \n", Sampling(), EmptyPrompt, "the prompt is empty"),
        ("word " * 20_000, Sampling(), PromptTooLong, r"the prompt has \d+ tokens"),
        ("hello", Sampling(temperature=-1.0), InvalidSampling, "temperature is -1"),
        ("hello", Sampling(temperature=float("nan")), InvalidSampling, "temperature is nan"),
        ("hello", Sampling(top_p=1.5), InvalidSampling, r"top_p is 1\.5"),
    ],
)
def test_the_sdk_raises_a_typed_error(cluster, text, sampling, error, sentence):
    with Client(cluster.address) as client:
        session = client.create_session()
        with pytest.raises(error, match=sentence):
            session.generate(text, sampling=sampling).collect()
        assert session.details().turns == ()  # nothing began
        session.delete()


def test_the_sdk_names_an_unknown_session_and_a_wrong_name(cluster):
    with Client(cluster.address) as client:
        with pytest.raises(UnknownSession, match="nobody"):
            client.session("nobody").generate("hello").collect()
        with pytest.raises(InvalidName, match="session_id"):
            client.create_session("../../etc/passwd")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["chat", "-m", ""], "the prompt is empty"),
        (["chat", "-m", "word " * 20_000], "tokens with the session's history"),
        (["chat", "-m", "hello", "--temperature", "-1"], "temperature is -1"),
        (["sessions", "show", "nobody"], "nobody"),
        (["sessions", "delete", "nobody"], "nobody"),
    ],
)
def test_the_command_line_prints_one_sentence(cluster, arguments, sentence):
    result = kvferry(*arguments, "--coordinator", cluster.address)
    assert_one_sentence(result, sentence)
    assert result.stdout == ""


@pytest.fixture
def broken_models(model, tmp_path) -> dict[str, Path]:
    (tmp_path / "no-config").mkdir()
    (tmp_path / "no-config" / "readme.txt").write_text("nothing here")
    listed = json.loads(kvferry("models", "list", "--json").stdout)
    whole = next(Path(entry["path"]) for entry in listed if entry["name"] == model)
    half = tmp_path / "half.gguf"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    return {"no-config": tmp_path / "no-config", "half": half, "missing": tmp_path / "missing"}


@pytest.mark.parametrize(
    ("which", "sentence"),
    [("no-config", "without a config.json"), ("half", "half.gguf"), ("missing", "there is no model")],
)
@pytest.mark.parametrize("role", ["node", "coordinator"])
def test_a_model_that_is_none(cluster, broken_models, tmp_path, role, which, sentence):
    arguments = run_arguments(role, cluster, str(broken_models[which]), tmp_path)
    assert_one_sentence(kvferry(*arguments), sentence)


@pytest.mark.parametrize("role", ["node", "coordinator"])
def test_a_port_in_use(cluster, model, tmp_path, role):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = kvferry(*run_arguments(role, cluster, model, tmp_path, listen=address))
    assert_one_sentence(result, address)


def test_a_second_coordinator_on_the_port_of_the_first(cluster, model, tmp_path):
    result = kvferry(*run_arguments("coordinator", cluster, model, tmp_path, listen=cluster.address))
    assert_one_sentence(result, cluster.address)


@pytest.mark.parametrize("role", ["node", "coordinator"])
def test_a_store_that_is_a_file(cluster, model, tmp_path, role):
    (tmp_path / "store").write_text("not a folder")
    assert_one_sentence(kvferry(*run_arguments(role, cluster, model, tmp_path)), str(tmp_path / "store"))


def test_a_state_folder_that_is_a_file(cluster, model, tmp_path):
    (tmp_path / "state").write_text("not a folder")
    assert_one_sentence(kvferry(*run_arguments("coordinator", cluster, model, tmp_path)), str(tmp_path / "state"))


def test_up_in_a_directory_that_is_in_use_or_a_file(cluster, tmp_path):
    assert_one_sentence(kvferry("up", "--port", "0", "--dir", str(cluster.directory)), "Another cluster runs in")
    (tmp_path / "file").touch()
    result = kvferry("up", "--port", "0", "--dir", str(tmp_path / "file"))
    assert result.returncode == 2  # click's own check of the option
    assert "is a file" in result.stderr


def test_up_on_a_port_in_use(cluster, tmp_path):
    result = kvferry("up", "--port", cluster.address.rpartition(":")[2], "--dir", str(tmp_path))
    assert_one_sentence(result, cluster.address)


def run_arguments(role: str, cluster, model: str, tmp_path: Path, listen: str = "127.0.0.1:0") -> list[str]:
    store = ["--store", str(tmp_path / "store"), "--listen", listen, "--model", model]
    if role == "node":
        return ["node", "run", *store, "--coordinator", cluster.address, "--node-id", "extra", "--threads", "1"]
    return ["coordinator", "run", *store, "--state", str(tmp_path / "state")]


def assert_one_sentence(result: subprocess.CompletedProcess[str], sentence: str) -> None:
    """An error, no traceback, and an exit code that is neither success nor wrong usage."""
    assert result.returncode not in {0, 2}, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert sentence in errors[0], errors[0]
    assert "Traceback" not in result.stderr
