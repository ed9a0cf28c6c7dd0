"""`kvferry top` in a real terminal, against a coordinator that goes away and comes back."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from kvferry.client.commands.top import _keys
from kvferry.client.sdk import ClusterStatus, Finished, FinishReason, NodeInfo, NodeLost, NodeState, Placed, Token
from kvferry.client.top.picture import Phase, Picture, Stream
from kvferry.client.top.view import view
from kvferry.proto.v1 import chat_pb2

from .scripted_coordinator import Hang, placed, started, tokens

TOP = [sys.executable, "-m", "kvferry.client.cli", "top", "--interval", "0.1"]


class Screen:
    """`kvferry top` in a terminal of so many columns."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.seen = ""

    async def shows(self, words: str, timeout_s: float = 20.0) -> None:
        """Waits for words that come from now on."""
        start, until = len(self.seen), time.monotonic() + timeout_s
        while words not in self.seen[start:]:
            assert time.monotonic() < until, f"no {words!r} in {self.seen[-2000:]!r}"
            await asyncio.sleep(0.02)
            self.read()

    def read(self) -> None:
        os.set_blocking(self._descriptor, False)
        try:
            while data := os.read(self._descriptor, 65536):
                self.seen += data.decode(errors="replace")
        except (BlockingIOError, OSError):
            return

    def press(self, key: str) -> None:
        os.write(self._descriptor, key.encode())


@contextmanager
def terminal(columns: int, env: dict[str, str]) -> Iterator[tuple[Screen, subprocess.Popen[bytes]]]:
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        TOP, stdin=its, stdout=its, stderr=its, start_new_session=True, env=os.environ | env | {"TERM": "xterm"},
    )  # fmt: skip
    try:
        yield Screen(ours), process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        os.close(ours)
        os.close(its)


@pytest.mark.parametrize("key", ["q", "Ctrl-C"])
async def test_it_says_that_the_coordinator_went_away_and_goes_on_when_it_is_back(coordinator, env, key):
    coordinator.sessions["s"] = chat_pb2.Session(session_id="s", open_turn_id="turn-1", last_node_id="n1")
    coordinator.scripts = [[started(), placed("n1", 1), *tokens(0, 3), Hang()]] * 9
    with terminal(44, env) as (screen, process):
        await screen.shows("decode")
        await coordinator.stop()
        await screen.shows("trying")
        await coordinator.start()
        await screen.shows("1 turns open")
        if key == "q":
            screen.press(key)
        else:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            screen.read()
        screen.read()
        assert process.returncode == 0, screen.seen[-500:]
    assert screen.seen.count("\x1b[?1049h") == screen.seen.count("\x1b[?1049l") == 1  # the screen is as it was
    assert screen.seen.count("\x1b[2J") <= 1  # nothing is wiped between two refreshes: no flicker
    assert "Traceback" not in screen.seen


@pytest.mark.parametrize(
    ("keys", "leaves"), [("q", True), ("xq", True), ("\x1b", True), ("x", False), ("\x1b[A", False)], ids=repr
)
def test_of_keys_that_come_at_once_none_is_missed(monkeypatch, keys, leaves):
    ours, its = pty.openpty()
    with os.fdopen(ours, "wb", 0) as keyboard, os.fdopen(its) as stdin, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        with _keys() as wants_to_leave:
            keyboard.write(keys.encode())
            assert wants_to_leave(0.2 if not leaves else 20) is leaves


async def test_once_and_json_are_for_programs(coordinator, env):
    process = await asyncio.create_subprocess_exec(
        *TOP, "--once", "--json", stdout=asyncio.subprocess.PIPE, env=os.environ | env
    )
    out, _ = await process.communicate()
    (line,) = out.decode().splitlines()
    told = json.loads(line)
    assert (process.returncode, told["reachable"], told["status"]["model"]) == (0, True, "m")


def made(kind, **fields):
    """An event of which only these fields matter."""
    return kind(**dict.fromkeys(kind.__dataclass_fields__) | fields)


def test_a_stream_tells_phase_rate_pauses_and_moves():
    stream = Stream("session", "turn", 0.0)
    assert stream.phase is Phase.WAITING
    stream.push(Placed("n1", 1, 0, (), None), 1.0)
    assert (stream.phase, stream.node_id) == (Phase.PREFILL, "n1")
    for index in range(10):
        stream.push(made(Token, sequence=index), 2.0 + index / 10)
    assert stream.phase is Phase.DECODE
    assert stream.rate(3.0) == pytest.approx(10, rel=0.2)
    stream.push(made(NodeLost, node_id="n1"), 3.0)
    assert (stream.phase, stream.n_moves, stream.rate(3.0)) == (Phase.MOVING, 1, 0.0)
    stream.push(Placed("n2", 2, 10, (), None), 4.0)
    stream.push(made(Token, sequence=10), 5.4)
    assert (stream.node_id, stream.n_pauses) == ("n2", 1)
    assert stream.longest_pause_s == pytest.approx(2.5)
    over = made(Finished, reason=FinishReason.END)
    stream.push(over, 6.0)
    assert (stream.phase, stream.ended_s, stream.facts(6.0)["n_tokens"]) == (Phase.OVER, 6.0, 11)


def drawn(width: int, height: int, picture: Picture) -> list[str]:
    out = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    out.print(view(picture, width, height))
    return re.sub(r"\x1b\[[0-9;]*m", "", out.file.getvalue()).splitlines()  # type: ignore[attr-defined]


def a_node(number: int) -> NodeInfo:
    zeros = dict.fromkeys(NodeInfo.__dataclass_fields__, 0)
    told = {"node_id": f"node-{number}", "state": NodeState.LIVE, "kernel_path": "neon", "temperature_celsius": 91.0}
    return NodeInfo(**zeros | told | {"store": None})  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_it_fits_any_terminal_and_counts_what_does_not(width):
    zeros = dict.fromkeys(ClusterStatus.__dataclass_fields__, 0)
    nodes = tuple(a_node(number) for number in range(30))
    status = ClusterStatus(**zeros | {"model": "smollm2-135m", "nodes": nodes, "models": ()})  # type: ignore[arg-type]
    streams = tuple(Stream(f"session-{n}", "t", 0.0, node_id="node-1", phase=Phase.DECODE) for n in range(30))
    lines = drawn(width, 24, Picture("c:1", 5.0, status, streams, "cannot reach the coordinator at c:1.", 3.0))
    assert all(len(line.rstrip()) <= width for line in lines)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "node-0" in text
    assert "more nodes" in text
    assert "more streams" in text
    assert ("91 °C" in text) == (width >= 80)
    assert "trying on" in " ".join(text.split())
