"""Drills as a person runs them, on processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvferry.drills.journal import STATE_VARIABLE, Journal
from kvferry.drills.runner import why_not
from kvferry.drills.scenarios import SCENARIOS
from kvferry.drills.targets.local import LocalTarget
from kvferry.drills.targets.processes import OwnClusterOptions

KVFERRY = (sys.executable, "-m", "kvferry.client.cli")
TRIPWIRE = Path(__file__).parents[1] / "system" / "tripwire"


class Drill:
    """Runs `kvferry drill` with a state folder of its own, on a tiny model that is slowed down to be struck."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.runs, self.reports = folder / "runs", folder / "reports"
        orders = folder / "orders"
        orders.write_text(json.dumps({"pace": 0.02}))
        self._model = model
        self._environment = os.environ | {
            STATE_VARIABLE: str(self.runs),
            "PYTHONPATH": str(TRIPWIRE),
            "KVFERRY_TEST_TRIPWIRE": str(orders),
        }

    def argv(self, name: str, *more: str) -> list[str]:
        where = ("--model", str(self._model), "--report", str(self.reports))
        return [*KVFERRY, "drill", "run", name, *where, *more]

    def run(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(name, *more), env=self._environment, capture_output=True, text=True, check=False, timeout=200
        )

    def start(self, name: str, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(name, *more), env=self._environment, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL
        )

    def list(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*KVFERRY, "drill", "list"], env=self._environment, capture_output=True, text=True, check=True
        )

    def nothing_is_left(self) -> bool:
        """No file of a run, and no process that has one of its paths in its command."""
        ours = [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(self.runs) in " ".join(process.info["cmdline"] or [])
        ]
        return not ours and list(self.runs.iterdir()) == []


@pytest.fixture
def drill(chat_model: Callable[[str], Path], tmp_path: Path) -> Drill:
    return Drill(chat_model("qwen3_untied_f32"), tmp_path)


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Until the drill says so."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return
    raise AssertionError("".join(said))


def wait_until_clean(drill: Drill) -> None:
    until = time.monotonic() + 20
    while not drill.nothing_is_left():
        assert time.monotonic() < until, list(drill.runs.rglob("*"))
        time.sleep(0.05)


def test_a_killed_node_costs_no_token(drill: Drill) -> None:
    done = drill.run("kill", "--nodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == "held"
    assert told["figures"]["failovers"] == 1
    assert told["figures"]["tokens_compared"] >= 3 * 20
    assert {path.name for path in drill.reports.glob("*/*")} == {"report.json", "report.txt", "report.html"}
    assert drill.nothing_is_left()


def test_too_few_nodes_are_a_reason_to_skip(tmp_path: Path) -> None:
    target = LocalTarget(Journal(tmp_path), OwnClusterOptions(model="any", n_nodes=2))
    assert why_not(SCENARIOS["kill"], target) is None
    assert why_not(SCENARIOS["two-at-once"], target) == "it needs 3 nodes, there are 2"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_drill_holds_on_processes(drill: Drill, name: str) -> None:
    done = drill.run(name, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["verdict"] in {"held", "skipped"}
    assert drill.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["freeze", "store-hung"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_drill_leaves_nothing(drill: Drill, name: str, number: signal.Signals) -> None:
    with drill.start(name) as process:
        wait_for(process, f"{name}: ")
        process.send_signal(number)
        assert process.wait(60) == (-9 if number is signal.SIGKILL else 130)
    wait_until_clean(drill)
    assert "cleaning up" not in drill.list().stderr


@pytest.mark.slow
def test_a_drill_that_died_with_its_reaper_is_cleaned_up_by_the_next_one(drill: Drill) -> None:
    with drill.start("freeze") as process:
        wait_for(process, "freeze: ")
        reaper = next(p for p in psutil.Process(process.pid).children() if "kvferry.drills.reaper" in p.cmdline())
        reaper.kill()
        process.kill()
    listed = drill.list()
    assert "cleaning up after the drill freeze" in listed.stderr
    assert listed.stdout.startswith("demo  ")
    wait_until_clean(drill)
