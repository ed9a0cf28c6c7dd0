"""What holds for all commands alike: walked over the whole tree, so that a new one is held to it too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.client.cli import SHORT_HELP, kvferry
from kvferry.client.reference import commands, reference

COMMANDS = dict(commands())
NAMES = [pytest.param(path, id=" ".join(path)) for path in COMMANDS]
WITHOUT_JSON = {
    ("up",), ("node", "run"), ("node", "drain"), ("coordinator", "run"), ("gateway", "run"),  # they serve
    ("config", "init"), ("completion",), ("score",),  # their output is a file
}  # fmt: skip
"""What neither lists nor shows anything."""


def kvferry_says(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry.client.cli", *arguments],
        input=stdin, capture_output=True, text=True, timeout=120, check=False, env=os.environ | env,
    )  # fmt: skip


def test_the_documentation_is_made_of_the_commands():
    written = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    assert written == reference(), "run: python -m kvferry.client.reference > docs/cli.md"


def test_the_main_help_tells_every_command():
    assert {path[0] for path in COMMANDS} <= SHORT_HELP.keys()


@pytest.mark.parametrize("path", NAMES)
def test_help_says_what_it_does_and_gives_an_example(path):
    command = COMMANDS[path]
    words = f"{command.help or ''}\n{command.epilog or ''}"
    assert f"Example: kvferry {path[0]}" in words
    assert len((command.help or "").split()) >= 3
    for parameter in command.params:
        if parameter.param_type_name == "option":
            assert parameter.help or "--" in parameter.opts[0], parameter.name


@pytest.mark.parametrize("path", NAMES)
def test_what_lists_or_shows_has_json(path):
    has_json = any("--json" in parameter.opts for parameter in COMMANDS[path].params)
    changes = path[0] in {"certs", "tokens"} and path[1] not in {"show", "list"}
    assert has_json or changes or path in WITHOUT_JSON or path[0] == "bench"


GARBAGE = ["-1", "nonsense", "--no-such-option", "/dev/null", "café", "∞", "9" * 40]


SLOW_TO_REFUSE = {"bench", "up", "storm", "simulate", "drill", "doctor", "fleet", "node", "coordinator", "gateway"}
"""Some garbage means something to them; they are asked below for an option that they do not have."""


@pytest.mark.parametrize("path", [name for name in NAMES if name.values[0][0] not in SLOW_TO_REFUSE])
def test_garbage_never_brings_a_traceback(path, tmp_path, monkeypatch):
    """As arguments, and as the value of every option."""
    monkeypatch.setenv("KVFERRY_COORDINATOR", "no address")  # refused at once: nobody waits for it
    monkeypatch.chdir(tmp_path)
    command = COMMANDS[path]
    tries = [[word] for word in GARBAGE] + [[word, word] for word in GARBAGE[:4]]
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.is_flag:
            tries += [[parameter.opts[0], "nonsense"], [parameter.opts[0], ""]]
    from kvferry.terminal.failures import sentence_of

    for arguments in tries:
        result = CliRunner().invoke(kvferry, [*path, *arguments], catch_exceptions=True)
        known = result.exception is None or isinstance(result.exception, SystemExit) or sentence_of(result.exception)
        assert known, (arguments, result.exception)


def test_a_file_whose_name_is_no_text_is_printed_as_it_is(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    said = subprocess.run(
        [sys.executable, "-m", "kvferry.client.cli", "certs", "init", name], capture_output=True, check=False
    )
    assert (said.returncode, name in said.stdout, said.stderr) == (0, True, b"")


@pytest.mark.parametrize("path", [name for name in NAMES if name.values[0][0] in SLOW_TO_REFUSE - {"bench"}])
def test_an_unknown_option_is_wrong_usage(path):
    assert CliRunner().invoke(kvferry, [*path, "--no-such-option"]).exit_code == 2


def test_a_bug_is_one_sentence_and_its_traceback_lies_in_a_file(tmp_path):
    code = (
        "import click, kvferry.client.cli as c\n"
        "def boom(): raise ZeroDivisionError('no words of anybody')\n"
        "c.LazyGroup.get_command = lambda *_: click.Command('boom', callback=boom)\n"
        "c.main(['boom'])\n"
    )
    run = [sys.executable, "-c", code]
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    env.pop("JOURNAL_STREAM", None)
    said = subprocess.run(run, capture_output=True, text=True, env=env, check=False)
    assert said.returncode == 70
    assert said.stderr.startswith("error: this is a bug in kvferry: ZeroDivisionError: no words of anybody. ")
    assert "Traceback" not in said.stderr
    (kept,) = tmp_path.rglob("bug-*.txt")
    assert str(kept) in said.stderr
    assert "Traceback" in kept.read_text()
    assert kept.stat().st_mode & 0o77 == 0
    shown = subprocess.run(run, capture_output=True, text=True, env=env | {"KVFERRY_TRACEBACK": "1"}, check=False)
    assert "Traceback" in shown.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["chatt"], "'chat'"),
        (["sessions", "lst"], "'list'"),
        (["nodes", "--jsn"], "'--json'"),
        (["kv", "fsk"], "'fsck'"),
    ],
)
def test_a_slip_of_the_finger_is_answered_with_what_was_meant(typed, meant):
    result = CliRunner().invoke(kvferry, typed)
    assert (result.exit_code, meant in result.output) == (2, True), result.output


def test_json_is_one_document_whatever_is_shown():
    for arguments in (["models", "list"], ["drill", "list"], ["drill", "explain", "kill"]):
        said = kvferry_says(*arguments, "--json")
        assert said.returncode == 0, said
        json.loads(said.stdout)


def test_no_color_is_honoured_on_terminals():
    import pty

    def of_a_terminal(**env: str) -> bytes:
        ours, its = pty.openpty()
        command = [sys.executable, "-m", "kvferry.client.cli", "chat", "-m", "x", "--patience", "1"]
        env["KVFERRY_COORDINATOR"] = "127.0.0.1:1"  # that it is away is told in a dim colour
        subprocess.run(command, stdout=its, stderr=its, env=os.environ | env, timeout=60, check=False)
        os.close(its)
        said = os.read(ours, 65536)
        os.close(ours)
        return said

    assert b"\x1b[2m" in of_a_terminal()
    assert b"\x1b[2m" not in of_a_terminal(NO_COLOR="1")
