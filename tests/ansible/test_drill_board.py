"""What strikes and heals a board, without a board."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .conftest import load_program


@pytest.fixture
def board(ansible: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    program = load_program(ansible / "drill" / "board.py")
    monkeypatch.setattr(program, "HERE", tmp_path)
    return program


@pytest.fixture
def commands(board: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What it would have run."""
    done: list[tuple[str, ...]] = []
    for name in ("run", "quietly"):
        monkeypatch.setattr(board, name, lambda *argv, text=None: done.append(argv))
    monkeypatch.setattr(board, "device", lambda: "eth0")
    monkeypatch.setattr(board, "main_process", lambda _unit: 0)
    return done


def snapshots(folder: Path) -> list[Path]:
    paths = [folder / f"kv_{number}.kv" for number in range(3)]
    for path in paths:
        path.write_bytes(bytes(range(200)))
        path.chmod(0o440)
    os.utime(paths[2], (1.0, 1.0))
    return paths


def test_only_snapshots_of_the_drill_rot_and_healing_puts_back_what_is_still_there(
    board: ModuleType, commands: list[tuple[str, ...]], tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    new, refused, old = snapshots(tmp_path / "store")
    right = new.read_bytes()
    before = new.stat()
    told = board.strike("store-rotten", 30.0, "kvferry-node", str(tmp_path / "store"))
    assert told["n_flipped"] == 2
    assert (old.read_bytes(), new.read_bytes() != right) == (right, True)
    assert sum(a != b for a, b in zip(new.read_bytes(), right, strict=True)) == 1
    assert (new.stat().st_mtime_ns, new.stat().st_size) == (before.st_mtime_ns, before.st_size)
    refused.rename(tmp_path / "quarantined")
    assert board.heal() == {"healed": "store-rotten"}
    assert new.read_bytes() == right
    assert (tmp_path / "quarantined").read_bytes() != right
    assert board.heal() == {"healed": ""}  # twice does no harm


@pytest.mark.parametrize(
    ("what", "heals"),
    [
        ("freeze", ("systemctl", "kill", "-s", "CONT", "--kill-whom=all", "kvferry-node")),
        ("cut", ("nft", "delete", "table", "inet", "kvferry_drill_cut")),
        ("cut-outgoing", ("nft", "delete", "table", "inet", "kvferry_drill_cut_outgoing")),
        ("slow-link", ("tc", "qdisc", "del", "dev", "eth0", "root")),
    ],
)
def test_the_boards_own_timer_is_set_before_it_is_struck(
    board: ModuleType, commands: list[tuple[str, ...]], what: str, heals: tuple[str, ...], tmp_path: Path
) -> None:
    board.strike(what, 9.0, "kvferry-node", str(tmp_path))
    struck: dict[str, Any] = json.loads(board.state_of(what).read_text())
    assert struck["what"] == what
    timer, strike = (i for i, argv in enumerate(commands) if argv[1] not in {"stop", "reset-failed"})
    assert commands[timer][0] == "systemd-run"
    assert "--on-active=9.0" in commands[timer]
    assert timer < strike
    board.heal()
    assert commands[-2:] == [heals, ("systemctl", "stop", f"drill-heals-kvferry-{what}.timer")]
    assert not board.state_of(what).exists()


def test_a_board_that_is_struck_twice_is_healed_of_both_by_a_timer_each(
    board: ModuleType, commands: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """The store rots, and then the node is killed: what rotted must not be forgotten, nor the second strike fail."""
    (path, *_) = snapshots(tmp_path)
    whole = path.read_bytes()
    board.strike("store-rotten", 9.0, "kvferry-node", str(tmp_path))
    assert path.read_bytes() != whole
    board.strike("kill", 4.0, "kvferry-node", str(tmp_path))
    timers = [argv[2] for argv in commands if argv[0] == "systemd-run"]
    assert timers == ["--unit=drill-heals-kvferry-store-rotten", "--unit=drill-heals-kvferry-kill"]
    assert board.heal("kill") == {"healed": "kill"}
    assert path.read_bytes() != whole
    assert board.heal() == {"healed": "store-rotten"}
    assert path.read_bytes() == whole
    assert board.heal() == {"healed": ""}


class Clock:
    """A board's: `now` is Unix time, `up` runs on whatever is set."""

    CLOCK_REALTIME, CLOCK_BOOTTIME = time.CLOCK_REALTIME, time.CLOCK_BOOTTIME

    def __init__(self) -> None:
        self.now, self.up = 1_800_000_000.0, 500.0

    def time(self) -> float:
        return self.now

    def clock_gettime(self, which: int) -> float:
        return self.up if which == self.CLOCK_BOOTTIME else self.now

    def clock_settime(self, which: int, seconds: float) -> None:
        assert which == self.CLOCK_REALTIME
        self.now = seconds

    def run_on(self, seconds: float) -> None:
        self.now, self.up = self.now + seconds, self.up + seconds


@pytest.mark.parametrize("what", ["clock-forward", "clock-back"])
@pytest.mark.parametrize("is_right", [False, True])
def test_a_clock_is_healed_to_the_right_time_whoever_has_set_it_meanwhile(
    board: ModuleType, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, what: str, is_right: bool
) -> None:
    """A time server may have; and a board whose strike failed before the clock was set must keep its time."""
    clock = Clock()
    monkeypatch.setattr(board, "time", clock)
    board.strike(what, 9.0, "kvferry-node", "/nowhere")
    assert abs(clock.now - 1_800_000_000.0) == 3600
    clock.run_on(10.0)
    if is_right:
        clock.now = 1_800_000_010.0
    board.heal()
    assert clock.now == 1_800_000_010.0


def test_snapshots_are_touched_as_their_owner_for_whom_alone_a_share_takes_writes(
    board: ModuleType, commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server has root be nobody, and even the owner may not write into a published file as it is."""
    store, users = tmp_path / "store", list[int]()
    store.mkdir()
    (path, *_) = snapshots(store)
    monkeypatch.setattr(os, "seteuid", users.append)
    board.strike("store-rotten", 9.0, "kvferry-node", str(store))
    board.heal()
    owner, me = store.stat().st_uid, os.geteuid()
    assert users == [owner, me] * 3  # to look, to damage, to put right
    assert stat.S_IMODE(path.stat().st_mode) == 0o440


def test_one_strike_that_cannot_be_undone_keeps_its_timer_and_no_other_from_being_healed(
    board: ModuleType, commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*argv: str, text: str | None = None) -> None:
        del text
        if argv[0] == "nft":
            sys.exit("nft: Operation not permitted")

    for what in ("cut", "freeze"):
        board.strike(what, 9.0, "kvferry-node", str(tmp_path))
    commands.clear()
    monkeypatch.setattr(board, "run", refuse)
    with pytest.raises(SystemExit, match="could not be healed: cut: nft: Operation not permitted"):
        board.heal()
    assert [board.state_of(what).exists() for what in ("cut", "freeze")] == [True, False]
    assert commands == [
        ("systemctl", "kill", "-s", "CONT", "--kill-whom=all", "kvferry-node"),
        ("systemctl", "stop", "drill-heals-kvferry-freeze.timer"),
    ]


def test_a_signal_comes_at_the_moment_that_is_told(
    board: ModuleType, commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(board, "main_process", lambda _unit: process.pid)
        board.strike("kill", 9.0, "kvferry-node", str(tmp_path))
        assert process.wait(30) == -signal.SIGKILL
    assert commands[-1][0] == "systemd-run"  # not systemctl kill: it might meet the process that systemd started anew


def test_what_heals_is_outside_the_sandbox_of_our_units(board: ModuleType, ansible: Path) -> None:
    """A drop-in for kvferry-.service is one for every unit whose name begins so, and takes all capabilities away."""
    base = (ansible / "roles/base/tasks/main.yml").read_text()
    (prefix,) = re.findall(r"/etc/systemd/system/([\w-]+)\.service\.d/sandbox\.conf", base)
    assert not board.HEALER.startswith(prefix)


def test_ssh_is_never_cut(board: ModuleType) -> None:
    for hooks in (("input", "output"), ("output",)):
        rules = board.chains("cut", *hooks)
        assert rules.count("policy drop") == len(hooks)
        assert all(f"{'d' if hook == 'input' else 's'}port 22 accept" in rules for hook in hooks)


def test_a_board_says_what_can_be_done_there(
    board: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(board.time, "clock_settime", refuse)
    ways = board.probe(str(tmp_path))
    assert {"kill", "freeze", "power-cut", "store-rotten"} <= set(ways)
    assert not {"clock-forward", "store-full"} & set(ways)  # a board's disk is never filled


def test_a_program_that_may_not_do_its_work_is_no_means(
    board: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without the right to change its network."""
    for name in ("nft", "tc", "ip"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho Operation not permitted >&2; exit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not {"cut", "cut-outgoing", "slow-link"} & set(board.probe(str(tmp_path)))


def test_two_that_heal_at_once_do_not_meet(
    board: ModuleType, commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the board's own timer and the drill's play do."""
    board.strike("slow-link", 9.0, "kvferry-node", str(tmp_path))
    undone: list[str] = []

    def undo(struck: dict[str, Any]) -> None:
        time.sleep(0.2)
        undone.append(struck["what"])

    monkeypatch.setattr(board, "undo", undo)
    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(lambda names: board.heal(*names)["healed"], [("slow-link",), ()]))
    assert undone == ["slow-link"]
    assert sorted(told) == ["", "slow-link"]
