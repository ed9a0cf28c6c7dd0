"""How far something is: in a real terminal, in a pipe, in a log."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from kvferry.terminal.progress import Lines

CODE = """
import time
from kvferry.terminal.progress import gauge
with gauge('pack m', 1000) as told:
    for _ in range(10):
        told.advance(100); time.sleep(0.03)
print('done')
"""


def of_a_terminal(*command: str, exit_code: int = 0, **env: str) -> str:
    ours, its = pty.openpty()
    process = subprocess.Popen(
        command, stdout=its, stderr=its, env=os.environ | {"TERM": "xterm", "COLUMNS": "100"} | env
    )
    os.close(its)
    said = b""
    while True:
        try:
            said += os.read(ours, 65536)
        except OSError:  # the other side is gone
            break
    assert process.wait(30) == exit_code
    os.close(ours)
    return said.decode()


def test_a_terminal_gets_a_bar_with_rate_and_time_left():
    said = of_a_terminal(sys.executable, "-c", CODE)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
    assert re.search(r"pack m .*/1\.0 kB .*/s .*0:00:0", plain), plain
    assert "done" in plain
    assert "\x1b[3" not in of_a_terminal(sys.executable, "-c", CODE, NO_COLOR="1")


def test_what_is_quick_says_nothing_in_a_pipe():
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == ("done\n", "")


def test_what_takes_long_says_so_in_plain_lines():
    now, said = [0.0], []
    lines = Lines("fetch m", in_bytes=True, clock=lambda: now[0], say=said.append)
    for second in range(1, 21):
        now[0] = float(second)
        lines(second * 1_000_000, 40_000_000)
    assert said == [
        "fetch m: 12%, 5.0 MB of 40.0 MB, 1.0 MB/s, 35.0 s left",
        "fetch m: 38%, 15.0 MB of 40.0 MB, 1.0 MB/s, 25.0 s left",
    ]
    counted = Lines("files", in_bytes=False, clock=lambda: now[0], say=said.append)
    now[0] = 30.0
    counted(20, None)
    assert said[-1] == "files: 20, 2.0/s"


def test_a_command_shows_its_bar_on_terminals_only(tmp_path: Path, smollm2_path: Path):
    command = (sys.executable, "-m", "kvferry.client.cli", "models", "verify", str(smollm2_path))
    assert "check" in of_a_terminal(*command)
    said = subprocess.run(command, capture_output=True, check=True).stderr
    assert b"\x1b" not in said
    assert b"\r" not in said  # where it takes long it is told in plain lines
