"""`kvferry config`, and how processes tell what is wrong with what they were told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvferry.client.cli import kvferry
from kvferry.settings.fields import describe
from kvferry.settings.reference import ROLES, reference
from kvferry.settings.roles import role_names, settings_of

DOCS = Path(__file__).parents[2] / "docs"


def run(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(kvferry, ["config", *arguments], env=env)


def test_the_documentation_is_made_of_the_settings() -> None:
    remedy = "run: python -m kvferry.settings.reference > docs/configuration.md"
    assert (DOCS / "configuration.md").read_text() == reference(), remedy
    assert sorted(ROLES) == role_names()


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_says_what_it_is_and_why(role: str) -> None:
    for name, field in settings_of(role).model_fields.items():
        told = describe(name, field)
        assert told.what, f"{role}: {name} lacks a description"
        assert told.why, f"{role}: {name} lacks the reason for its default"
        assert not told.why.endswith("."), name
        assert told.default or told.example != '""', f"{role}: {name} has neither default nor example"


@pytest.mark.parametrize("role", ROLES)
def test_init_writes_every_setting_with_its_default(role: str) -> None:
    text = run("init", role).output
    assert tomllib.loads(text) == {}
    written = tomllib.loads(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE))
    model = settings_of(role)
    assert written.keys() == model.model_fields.keys()
    for name, field in model.model_fields.items():
        told = describe(name, field)
        assert told.unit in text
        if told.default:
            assert tomllib.loads(f"x = {told.default}")["x"] == written[name]


def test_init_sets_what_is_given_and_the_node_can_be_started_with_it(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(run("init", "node", "--model", "m", "--kv-memory", "2GiB").output)
    assert tomllib.loads(file.read_text()) == {"model": "m", "kv_memory": "2GiB"}
    said = run("check", "node", "--config", str(file))
    assert said.exit_code == 0
    assert re.fullmatch(r"node: 2 settings given, \d+ in all; they can be used\n", said.output)


def test_show_tells_whence_each_value_is(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('model = "m"\nmax_running = 3\nthreads = 2\n')
    said = run(
        "show", "node", "--config", str(file), "--threads", "4", "--json",
        KVFERRY_NODE_MAX_RUNNING="5", KVFERRY_NODE_KV="f16",
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    rows = {row["name"]: (row["value"], row["from"], row["by"]) for row in json.loads(said.output)["settings"]}
    assert rows["model"] == ('"m"', "file", "model in node.toml")
    assert rows["threads"] == ("4", "flag", "--threads")
    assert rows["max_running"] == ("5", "environment", "KVFERRY_NODE_MAX_RUNNING")
    assert rows["kv"] == ('"f16"', "environment", "KVFERRY_NODE_KV")
    assert rows["kv_memory"] == ('"1GiB"', "default", "")


def test_all_problems_of_all_sources_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('modl = "m"\nkv = "q9"\n[tls]\nx = 1\n')
    said = run(
        "check", "node", "--config", str(file), "--threads=-3", "--ready-file", "/nowhere/r.json",
        KVFERRY_NODE_KV_MEMRY="1GiB", KVFERRY_NODE_LISTEN="nonsense",
    )  # fmt: skip
    assert said.exit_code == 1
    assert said.output.splitlines() == [
        "error: 8 settings of the node are not right:",
        "  modl in node.toml is no setting of a node; did you mean model?",
        "  tls in node.toml is no setting of a node; did you mean tls_dir?",
        "  KVFERRY_NODE_KV_MEMRY in the environment is no setting of a node; did you mean KVFERRY_NODE_KV_MEMORY?",
        "  model is missing",
        "  KVFERRY_NODE_LISTEN 'nonsense' is not HOST:PORT",
        "  --threads -3 must be at least 0",
        "  kv in node.toml 'q9' must be 'f32', 'f16' or 'q8'",
        "  --ready-file there is no folder /nowhere for r.json: make it, or name another file",
    ]
    assert len(json.loads(run("check", "node", "--json").output)["problems"]) == 1


@pytest.mark.parametrize("role", ROLES)
def test_the_process_says_the_same_as_config_check(role: str, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('listn = "x"\nlisten = "y"\n')
    options = ("--config", str(file), "--ready-file", "/nowhere/r.json")
    checked = run("check", role, *options)
    started = subprocess.run(
        [sys.executable, "-m", "kvferry.client.cli", role, "run", *options],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (started.returncode, checked.exit_code) == (1, 1)
    assert started.stderr == checked.output
    assert "did you mean listen?" in started.stderr
    assert "/nowhere" in started.stderr


def test_options_are_those_of_run_and_a_wrong_one_is_told_as_there() -> None:
    said = run("show", "node", "--modl", "x")
    assert said.exit_code == 2
    assert "--model" in said.output
    assert "kvferry node run --help" in said.output


def test_a_file_that_cannot_be_used_is_told_beside_the_rest(tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text("model =")
    said = run("check", "node", "--config", str(tmp_path / "n.toml"), "--threads=-1").output
    assert "is not TOML" in said
    assert "--threads -1" in said


@pytest.mark.parametrize(
    ("file", "reason"),
    [("/dev/zero", "has more than 1 MiB"), ("binary.toml", "byte 0 is not UTF-8"), ("nested.toml", "is not TOML")],
)
def test_a_file_that_holds_no_settings_is_told_and_soon_left_alone(tmp_path: Path, file: str, reason: str) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "nested.toml").write_text("a = " + "[" * 100_000)
    result = run("check", "node", "--config", str(tmp_path / file))
    assert result.exit_code == 1
    assert reason in result.output
