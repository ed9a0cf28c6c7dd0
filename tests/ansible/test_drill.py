"""Drills on boards as an operator rehearses them: over ssh, on a fleet that site.yml made. About ten minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from .fleet import NODES, Fleet, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DRILLS = (
    "kill", "freeze", "cut", "cut-one-way", "slow-link", "store-rotten", "coordinator-loss", "two-at-once",
    "thundering-herd", "power-cut",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _rolled_out(first_run: Run) -> None:
    assert first_run.returncode == 0, first_run.output[-4000:]


def drill(fleet: Fleet, folder: Path, name: str) -> subprocess.Popen[str]:
    """`kvferry drill run` on the boards' network."""
    argv = ["drill", "run", name, "--target", f"inventory={fleet.inventory}", "--report", str(folder / "reports")]
    environment = {
        "KVFERRY_DRILLS": str(folder / "runs"),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(fleet.rig.folder / "cp"),
        "ANSIBLE_NOCOLOR": "1",
    }
    return subprocess.Popen(
        fleet.kvferry(*argv, "--json", "--allow-power-cut"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def rules(fleet: Fleet) -> list[str]:
    """What a drill may leave on boards."""
    look = (
        "nft list tables; tc qdisc show | grep tbf; ls -d /run/kvferry-drill; systemctl list-timers | grep drill; true"
    )
    return [fleet.rig.ssh(board, look).stdout for board in fleet.rig.boards]


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_on_boards_ends_with_its_verdict_and_leaves_nothing(fleet: Fleet, tmp_path: Path, name: str) -> None:
    fleet.wait_until_live([f"n{board}" for board in NODES], 60)
    out, err = drill(fleet, tmp_path, name).communicate(timeout=300)
    told: dict[str, Any] = json.loads(out) if out.startswith("{") else {}
    print(name, told.get("verdict"), told.get("figures"), told.get("reason"))
    assert told.get("verdict") == "held", out + err
    assert (told["figures"]["tokens_lost"], told["left_behind"]) == (0, [])
    assert set(rules(fleet)) == {""}
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_board_that_was_cut_off_heals_itself_when_nobody_is_left_to_do_it(fleet: Fleet, tmp_path: Path) -> None:
    fleet.wait_until_live([f"n{board}" for board in NODES], 60)
    process = drill(fleet, tmp_path, "cut")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("cut: "):
            break
    until = time.monotonic() + 30
    while not any("kvferry_drill" in told for told in rules(fleet)):
        assert time.monotonic() < until
        time.sleep(0.2)
    for child in psutil.Process(process.pid).children(recursive=True):
        child.send_signal(signal.SIGKILL)
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while any("kvferry_drill" in told for told in rules(fleet)):
        assert time.monotonic() < until
        time.sleep(0.5)
    fleet.wait_until_live([f"n{board}" for board in NODES], 60)
    listed = subprocess.run(
        fleet.kvferry("drill", "list"),
        env={**os.environ, "KVFERRY_DRILLS": str(tmp_path / "runs")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "cleaning up after the drill cut" in listed.stderr
    assert set(rules(fleet)) == {""}
