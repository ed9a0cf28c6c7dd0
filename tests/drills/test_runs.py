"""Drills as a person runs them: on processes of this machine, and on namespaces as boards."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from machine_noise import machine_noise

from kvferry.drills.journal import Journal
from kvferry.drills.runner import why_not
from kvferry.drills.scenarios import SCENARIOS
from kvferry.drills.targets import boards
from kvferry.drills.targets.local import LocalTarget
from kvferry.drills.targets.processes import OwnClusterOptions

from .drill_kit import Drill, wait_for, wait_until_clean


@pytest.fixture
def drill(chat_model: Callable[[str], Path], tmp_path: Path) -> Drill:
    return Drill(chat_model("qwen3_untied_f32"), tmp_path)


def test_a_killed_node_costs_no_token(drill: Drill) -> None:
    with machine_noise() as noise:
        done = drill.run("kill", "--nodes", "2", "--json")
    told = json.loads(done.stdout)
    # The drill holds itself to half a second, as if nothing else ran here.
    broken = [limit for limit in told["limits"] if not limit["held"]]
    late = [one for one in broken if one["name"] == "detection" and one["measured"] <= one["limit"] + 2 * noise[-1]]
    assert broken == late, done.stderr
    assert (told["verdict"], done.returncode) == ("held", 0) or late, done.stderr
    assert told["figures"]["failovers"] == 1
    assert told["figures"]["tokens_compared"] >= 3 * 20
    assert {path.name for path in drill.reports.glob("*/*")} == {"report.json", "report.txt", "report.html"}
    assert drill.nothing_is_left()


def test_too_few_nodes_are_a_reason_to_skip(tmp_path: Path) -> None:
    target = LocalTarget(Journal(tmp_path), OwnClusterOptions(model="any", n_nodes=2))
    assert why_not(SCENARIOS["kill"], target) is None
    assert why_not(SCENARIOS["two-at-once"], target) == "it needs 3 nodes, there are 2"


@pytest.fixture(params=["local", "netns"])
def target(request: pytest.FixtureRequest) -> str:
    if request.param == "netns" and (reason := boards.why_not()) is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_drill_holds_and_leaves_nothing_behind(drill: Drill, target: str, name: str) -> None:
    done = drill.run(name, "--json", "--target", target)
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told["verdict"] in {"held", "skipped"}
    assert told["left_behind"] == []
    assert drill.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["freeze", "store-hung"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_drill_leaves_nothing(drill: Drill, target: str, name: str, number: signal.Signals) -> None:
    with drill.start(name, "--target", target) as process:
        wait_for(process, f"{name}: ")
        process.send_signal(number)
        assert process.wait(60) == (-9 if number is signal.SIGKILL else 130)
    wait_until_clean(drill)
    assert "cleaning up" not in drill.list().stderr


@pytest.mark.slow
def test_a_drill_that_died_with_its_reaper_is_cleaned_up_by_the_next_one(drill: Drill, target: str) -> None:
    with drill.start("freeze", "--target", target) as process:
        wait_for(process, "freeze: ")
        reaper = next(p for p in psutil.Process(process.pid).children() if "kvferry.drills.reaper" in p.cmdline())
        reaper.kill()
        process.kill()
    listed = drill.list()
    assert "cleaning up after the drill freeze" in listed.stderr
    assert listed.stdout.startswith("demo  ")
    wait_until_clean(drill)
