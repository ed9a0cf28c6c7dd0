"""Boards made of namespaces, with an echo on one of them; each in a process that has moved into its own network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.drills.errors import DrillImpossible
from kvferry.drills.journal import STATE_VARIABLE, Journal
from kvferry.drills.targets import boards


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        (None, "there are no control groups of version 2"),
        (Path("/nowhere"), "no control groups can be made in /nowhere"),
    ],
)
def test_where_no_control_group_can_be_made_the_drill_is_skipped(
    monkeypatch: pytest.MonkeyPatch, folder: Path | None, reason: str
) -> None:
    """As in a container, which sees them and may not write there."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(boards.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(boards, "control_groups", lambda: folder)
    assert boards.why_not() == reason


def test_a_board_that_cannot_be_ended_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as holder:
        made = boards.Boards.__new__(boards.Boards)
        made.group, made._holders = tmp_path, {"node-1": holder}
        monkeypatch.setattr(boards, "HOLDER_S", 0)
        monkeypatch.setattr(boards, "_cables", list)
        try:
            assert made.left_behind() == [f"control group {tmp_path}"]
        finally:
            holder.kill()


ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 7))
while True:
    data, who = s.recvfrom(100)
    s.sendto(data, who)
"""

STORY = """
import json, socket, subprocess, sys, time
from kvferry.drills.journal import Journal
from kvferry.drills.targets.boards import Boards

def answers(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(0.3)
        s.sendto(b"?", (address, 7))
        try:
            return s.recv(100) == b"?"
        except OSError:
            return False

def tell(name, value):
    print(json.dumps([name, value]))

for _ in range(2):  # a drill after another, in one network
    with Journal.begin("boards") as journal:
        made = Boards(journal, ("coordinator", "node-1"))
        echo = subprocess.Popen([*made.within("node-1"), sys.executable, "-c", sys.argv[1]])
        until = time.monotonic() + 20
        while not answers(made.address("node-1")) and time.monotonic() < until:
            pass
        for name, strike, heal in (
            ("cut", lambda: made.plug("node-1", is_in=False), lambda: made.plug("node-1", is_in=True)),
            ("silenced", lambda: made.silence("node-1"), lambda: made.unsilence("node-1")),
            ("frozen", lambda: made.freeze("node-1", is_frozen=True), lambda: made.freeze("node-1", is_frozen=False)),
        ):
            strike()
            tell(name, answers(made.address("node-1")))
            heal()
            until = time.monotonic() + 20
            while not (is_back := answers(made.address("node-1"))) and time.monotonic() < until:
                pass
            tell("healed", is_back)
        made.slow("node-1", "128kbit")
        tell("slow", any(answers(made.address("node-1")) for _ in range(20)))
        made.unslow("node-1")
        made.freeze("node-1", is_frozen=True)  # and left so
    tell("left", made.left_behind())
    tell("ended", echo.wait(20))
"""


def test_a_board_is_cut_silenced_frozen_and_gone_without_a_trace(tmp_path: Path) -> None:
    reason = boards.why_not()
    if reason is not None:
        pytest.skip(reason)
    told = subprocess.run(
        ["unshare", "--net", "--mount", "--propagation", "private", sys.executable, "-c", STORY, ECHO],
        env={**os.environ, STATE_VARIABLE: str(tmp_path), boards.INSIDE: "1"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    once = [
        ["cut", False], ["healed", True], ["silenced", False], ["healed", True], ["frozen", False], ["healed", True],
        ["slow", True], ["left", []], ["ended", -9],
    ]  # fmt: skip
    assert [json.loads(line) for line in told.stdout.splitlines()] == once + once
    assert list(tmp_path.iterdir()) == []


def test_boards_are_refused_outside_of_a_network_of_their_own(tmp_path: Path) -> None:
    if boards.control_groups() is None:
        pytest.skip("no control groups of version 2")
    with pytest.raises(DrillImpossible, match="namespaces of its own"):
        boards.Boards(Journal(tmp_path), ("node-1",))
