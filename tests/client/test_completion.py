"""What the shells themselves make of `kvferry completion`."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.proto.v1 import chat_pb2

BASH = """
eval "$(kvferry completion bash)"
complete_line() {{ COMP_LINE="$1"; read -ra COMP_WORDS <<< "$1"; [[ "$1" == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMP_POINT=${{#1}}; _kvferry_completion kvferry
  printf '%s\\n' "${{COMPREPLY[@]}}"; }}
complete_line '{line}'
"""
FISH = "kvferry completion fish | source; complete --do-complete '{line}'"
ZSH_SETUP = 'autoload -U compinit; compinit -u -d {dump}; eval "$(kvferry completion zsh)"; echo set" "up\n'

LINES = [
    ("kvferry se", {"sessions"}),
    ("kvferry sessions ", {"list", "show"}),
    ("kvferry nodes --j", {"--json"}),
    ("kvferry models inspect smol", {"smollm2-135m"}),
    ("kvferry drill explain fr", {"freeze"}),
    ("kvferry sessions show my-s", {"my-session"}),
]


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}: apt-get install {shell}")


@pytest.fixture
def on_path(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment with `kvferry` among its programs, and no settings of whoever runs the tests."""
    program = tmp_path / "kvferry"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvferry.client.cli "$@"\n')
    program.chmod(0o755)
    return os.environ | env | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


async def said_by(*command: str, env: dict[str, str]) -> list[str]:
    """The words that a shell prints when it should complete a line; nothing else may be said."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert err == b""
    return out.decode().split()


@pytest.mark.parametrize(("line", "among"), LINES)
async def test_bash_completes(coordinator, on_path, line, among):
    coordinator.sessions["my-session"] = chat_pb2.Session(session_id="my-session")
    assert among <= set(await said_by("bash", "--norc", "-c", BASH.format(line=line), env=on_path))


@needs("fish")
@pytest.mark.parametrize(("line", "among"), LINES)
async def test_fish_completes(coordinator, on_path, line, among):
    coordinator.sessions["my-session"] = chat_pb2.Session(session_id="my-session")
    assert among <= set(await said_by("fish", "--no-config", "--command", FISH.format(line=line), env=on_path))


@needs("zsh")
async def test_zsh_completes_at_the_tab_key(coordinator, on_path, tmp_path):
    coordinator.sessions["my-session"] = chat_pb2.Session(session_id="my-session")
    await asyncio.to_thread(type_into_zsh, on_path, tmp_path)


def type_into_zsh(env: dict[str, str], folder: Path) -> None:
    ours, its = pty.openpty()
    zsh = subprocess.Popen(["zsh", "-f", "-i"], stdin=its, stdout=its, stderr=its, env=env, start_new_session=True)
    os.close(its)

    def type_until(typed: str, shown: str) -> None:
        os.write(ours, typed.encode())
        ends_at, screen = time.monotonic() + 60, ""
        while shown not in screen:
            assert time.monotonic() < ends_at, screen
            if select.select([ours], [], [], 0.2)[0]:
                screen += os.read(ours, 65536).decode(errors="replace")

    try:
        type_until(ZSH_SETUP.format(dump=folder / "zcompdump"), "set up")
        type_until("kvferry dri\t", "drill")
        type_until("explain fre\t", "freeze")
        type_until("\x15kvferry sessions show my-s\t", "my-session")
    finally:
        zsh.kill()
        zsh.wait()
        os.close(ours)


def test_completing_is_silent_when_the_coordinator_is_away(on_path):
    asked = {
        "_KVFERRY_COMPLETE": "bash_complete", "COMP_WORDS": "kvferry sessions show ", "COMP_CWORD": "3",
        "KVFERRY_COORDINATOR": "127.0.0.1:1",
    }  # fmt: skip
    said = subprocess.run(
        ["kvferry"], env=on_path | asked, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert (said.returncode, said.stdout.strip(), said.stderr) == (0, "", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_where_they_are_not_installed(on_path, shell):
    said = subprocess.run(
        ["kvferry", "completion", shell], env=on_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (said.returncode, "_KVFERRY_COMPLETE" in said.stdout) == (0, True)
