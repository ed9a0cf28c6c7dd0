from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.node.cli import node
from kvferry.node.config import NodeConfig
from kvferry.node.errors import ConfigInvalid


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "node.toml"
    file.write_text('model = "from-file"\nmax_running = 3\nmax_queued = 5\nkv_memory = "2GiB"\n')
    monkeypatch.setenv("KVFERRY_NODE_MAX_RUNNING", "4")
    monkeypatch.setenv("KVFERRY_NODE_MODEL", "from-environment")
    config = NodeConfig.load({"model": "from-flag", "store": None}, file)
    assert (config.model, config.max_running, config.max_queued) == ("from-flag", 4, 5)
    assert int(config.kv_memory) == 2 << 30


def test_all_problems_are_named_at_once() -> None:
    flags = {
        "listen": "nowhere",
        "coordinator": "host:99999",
        "node_id": "Not A Name",
        "threads": -1,
        "kv_memory": "much",
        "context": 3,
        "restore_deadline_seconds": float("nan"),
    }
    with pytest.raises(ConfigInvalid) as caught:
        NodeConfig.load(flags)
    sentence = str(caught.value)
    assert "model is missing" in sentence
    assert "'nowhere' is not HOST:PORT" in sentence
    for name in ("coordinator", "node-id", "threads", "kv-memory", "context", "restore-deadline-seconds"):
        assert name in sentence


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('model = "m"\nmax_runing = 3\n')
    with pytest.raises(
        ConfigInvalid, match=r"max_runing in node\.toml is no setting of a node; did you mean max_running"
    ):
        NodeConfig.load({}, file)


@pytest.mark.parametrize(("text", "says"), [("model = ", "is not TOML"), (None, "cannot be read")])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "node.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigInvalid, match=says):
        NodeConfig.load({"model": "m"}, file)


def test_it_is_frozen() -> None:
    config = NodeConfig.load({"model": "m"})
    with pytest.raises(ValueError, match="frozen"):
        config.threads = 3


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ({}, "127.0.0.1:7"),
        ({"listen": "10.0.0.2:0"}, "10.0.0.2:7"),
        ({"listen": "0.0.0.0:0", "advertise": "board1"}, "board1:7"),
        ({"listen": "0.0.0.0:0", "advertise": "board1:9000"}, "board1:9000"),
        ({"listen": "[::1]:0"}, "[::1]:7"),
        ({"listen": "[::1]:0", "advertise": "[fe80::1]:80"}, "[fe80::1]:80"),
    ],
)
def test_the_advertised_address_can_be_reached(flags: dict[str, str], address: str) -> None:
    assert NodeConfig.load({"model": "m"} | flags).advertised(7) == address


def test_listening_everywhere_needs_an_address_to_advertise() -> None:
    with pytest.raises(ConfigInvalid, match="set advertise"):
        NodeConfig.load({"model": "m", "listen": "0.0.0.0:0", "coordinator": "c:1"})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"listen": "127.0.0.1:99999"}, "listen '127.0.0.1:99999' has port 99999: a port lies between 0 and 65535"),
        ({"coordinator": "h:65536"}, "a port lies between 1 and 65535"),
        ({"coordinator": ""}, "coordinator '' is not HOST:PORT"),
        ({"advertise": "board:99999"}, "a port lies between 1 and 65535"),
        ({"kv_memory": "-1"}, "kv-memory '-1' is no size: give a positive number and a unit, such as 512MiB"),
        ({"kv_memory": "4 parsecs"}, "is no size"),
        ({"kv_memory": "10"}, "kv-memory '10' is too small: at least 1MiB"),
    ],
)
def test_a_wrong_setting_is_told_with_its_reason(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        NodeConfig.load({"model": "m"} | flags)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("ready_file", "says"),
    [("/nonexistent/r.json", "there is no folder /nonexistent for r.json"), ("/", "is a folder")],
)
def test_a_ready_file_that_cannot_be_written_is_told_before_anything_is_loaded(ready_file: str, says: str) -> None:
    said = CliRunner().invoke(node, ["run", "--model", "no-such-model", "--ready-file", ready_file]).exception
    assert isinstance(said, ConfigInvalid)
    assert says in str(said)
    NodeConfig.load({"model": "m", "ready_file": ready_file})  # may be meant for another machine


def test_settings_that_contradict_each_other_are_told_beside_all_other_problems() -> None:
    flags = {
        "listen": "0.0.0.0:0",
        "coordinator": "c:1",
        "kv_memory": "-1",
        "threads": -1,
        "kv": "q8",
        "store": "s",
        "store_version": 1,
    }
    with pytest.raises(ConfigInvalid) as caught:
        NodeConfig.load({"model": "m"} | flags)
    for words in ("set advertise", "kv-memory", "threads", "version 1 snapshots hold f32"):
        assert words in str(caught.value)
