"""No text of a model, a file or another user works the terminal of who reads it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kvferry.terminal.words import say

from .test_progress import of_a_terminal

ROOT = Path(__file__).parents[2]
ROOMS = ["client", "coordinator", "doctor", "engine", "fleet", "node", "settings", "simulator", "store", "trust"]
EVIL = "a\x1b]0;title\x07b\x1b[31mc\x9b2Jd\x7fe\rf\tg\r\nh"

PROGRAM = """
import json, sys
from rich.text import Text
from kvferry.terminal.output import console, print_json, print_table
from kvferry.terminal.words import say
text = json.loads(sys.argv[1])
for speak in (
    lambda: say(text),
    lambda: say(text, err=True),
    lambda: print_table(["x"], [[text]], ""),
    lambda: print_table(["x"], [], text),
    lambda: console().print(text),
    lambda: console().print(Text(text)),
    lambda: say("x", dim=True),
    lambda: print_json(text),
):
    speak()
    print("--", flush=True)
"""


def test_on_a_terminal_control_characters_are_only_seen_and_json_is_as_it_was() -> None:
    said = of_a_terminal(sys.executable, "-c", PROGRAM, json.dumps(EVIL)).replace("\r\n", "\n")
    *foreign, ours, as_json, _ = said.split("--\n")
    assert len(foreign) == 6
    for text in foreign:
        plain = re.sub(r"\x1b\[[01]?m", "", text)  # of a table's head
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain), plain
        assert r"a\x1b]0;title" in plain
        assert r"b\x1b[31mc\x9b2Jd\x7fe" in plain
        assert re.search(r"f\s+g\s*\n\s*h", plain), "newlines and tabs stay"
    assert "\x1b[2mx\x1b[0m" in ours, "style is ours"
    assert json.loads(as_json) == EVIL


def test_a_pipe_gets_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b]0;title\x07\r\n\x9b")
    assert capsys.readouterr().out == "a\x1b]0;title\x07\r\n\x9b\n"


def test_an_error_that_quotes_what_was_typed_is_harmless() -> None:
    for arguments, code in ((["kv", "ls", "/no\x1b[31mwhere"], 40), (["\x1b[31m"], 2)):
        said = of_a_terminal(sys.executable, "-m", "kvferry.client.cli", *arguments, exit_code=code)
        assert "\x1b" not in said
        assert r"\x1b[31m" in said


def test_all_commands_speak_through_the_gate() -> None:
    """But for JSON, which has its own way, and texts whose every part is shown."""
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for line in file.read_text().splitlines():
                if re.search(r"click\.s?echo\(|[^_\w]Console\(", line):
                    assert "json" in line or "shown(" in line, f"{file}: {line.strip()}"
