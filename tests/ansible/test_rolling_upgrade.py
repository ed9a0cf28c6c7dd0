"""Promise 27 on boards: releases change under people who talk to the fleet, and a bad one goes no further than a board.

The tests are one story, told in order; each leaves the fleet serving. About twenty-five minutes on an idle machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from kvferry.engine.files.resolve import resolve_model

from .fleet import ALL_LIVE, COORDINATOR, NODES, Fleet, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

N_PEOPLE: Final = 20
DRAIN_SECONDS: Final = 60.0
NOTHING: Final = {"failed": [], "lost": 0, "duplicated": 0, "reordered": 0, "differing": 0, "sentences": []}


@pytest.fixture(scope="module", autouse=True)
def _rolled_out(first_run: Run) -> None:
    assert first_run.returncode == 0, first_run.output[-4000:]


@contextmanager
def crowd(fleet: Fleet, n_people: int, found: dict[str, Any]) -> Iterator[None]:
    """People talk from its beginning to its end; then ``found`` says what they met."""
    command = fleet.as_operator([sys.executable, Path(__file__).with_name("crowd.py"), fleet.address, str(n_people)])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as people:
        assert people.stdout is not None
        try:
            assert people.stdout.readline() == "ready\n"
            yield
            told, _ = people.communicate(timeout=600)
        finally:
            people.kill()
    found |= json.loads(told)
    print(json.dumps(found))


def roll_out(fleet: Fleet, **variables: Any) -> Run:
    return fleet.play("rollout.yml", kvferry_model=str(resolve_model("smollm2-135m")), **variables)


def set_version(source: Path, version: str) -> None:
    path = source / "pyproject.toml"
    path.write_text(re.sub(r"^version = .*", f'version = "{version}"', path.read_text(), flags=re.MULTILINE))


@contextmanager
def edited(path: Path, before: str, after: str) -> Iterator[None]:
    """The source is another one meanwhile."""
    good = path.read_text()
    assert before in good
    path.write_text(good.replace(before, after, 1))
    yield
    path.write_text(good)


def drains_of(fleet: Fleet, board: int) -> list[float]:
    """How many seconds each stop of its node took, by the board's journal."""
    ask = "journalctl --no-pager -o short-unix _PID=1 | grep -E '(Stopping|Stopped) kvferry-node.service'"
    lines = [line.split() for line in fleet.rig.ssh(board, ask).stdout.splitlines()]
    times = [(float(line[0]), "Stopping" in line) for line in lines]
    return [ended - began for (began, begins), (ended, begins_again) in pairwise(times) if begins and not begins_again]


def releases(fleet: Fleet) -> dict[int, str]:
    return {board: fleet.release_on(board) for board in fleet.rig.boards}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_27_a_rollout_under_twenty_conversations_loses_nothing(fleet: Fleet, source: Path, number: int) -> None:
    """Three in a row."""
    found: dict[str, Any] = {}
    set_version(source, f"0.1.{number}")
    with crowd(fleet, N_PEOPLE, found):
        run = roll_out(fleet)
        assert run.returncode == 0, run.output[-4000:]
        assert "THE BITS CHANGE" not in run.output
        (release,) = set(releases(fleet).values())
        assert release.startswith(f"0.1.{number}-")
        assert fleet.live() == ALL_LIVE
    drains = {board: drains_of(fleet, board) for board in NODES}
    print(f"rollout {number}: {run.seconds:.0f} s; seconds to drain: {drains}")
    assert {name: found[name] for name in NOTHING} == NOTHING
    assert found["moved"] >= len(NODES)
    assert all(len(seconds) == number and max(seconds) < DRAIN_SECONDS for seconds in drains.values())


def test_a_build_that_computes_other_bits_never_touches_what_runs(fleet: Fleet, source: Path) -> None:
    """Its self-test says so while it is warmed up, beside what runs."""
    before = releases(fleet)
    set_version(source, "0.1.4")
    with edited(source / "engine/selftest.py", 'KvKind.F32: "', 'KvKind.F32: "0'):
        run = roll_out(fleet)
    assert run.returncode != 0
    assert "Compile the kernels and run them once" in run.output
    assert releases(fleet) == before
    assert fleet.live() == ALL_LIVE


def test_a_build_that_does_not_serve_stops_at_the_first_board_and_is_taken_back(fleet: Fleet, source: Path) -> None:
    """It starts and says it is ready, and its coordinator never hears of it."""
    before = fleet.release_on(COORDINATOR)
    set_version(source, "0.1.5")
    found: dict[str, Any] = {}
    membership = source / "node/membership.py"
    with crowd(fleet, 6, found):
        with edited(membership, "        async with asyncio.TaskGroup() as tasks:", "        await asyncio.sleep(1e6)\n"
                    "        async with asyncio.TaskGroup() as tasks:"):  # fmt: skip
            run = roll_out(fleet, node_join_seconds=10)
        assert run.returncode != 0
        assert f"rollback.yml (to {before})" in " ".join(run.output.split())
        assert [fleet.release_on(board) for board in NODES[1:]] == [before, before]
        assert fleet.live() == ALL_LIVE[1:]

        fleet.rig.power_cut(NODES[2])  # going back must not need it
        back = fleet.play("rollback.yml", kvferry_model=str(resolve_model("smollm2-135m")))
        assert back.returncode == 0, back.output[-4000:]
        assert f"{ALL_LIVE[2]} did not answer" in back.output
        fleet.rig.start(NODES[2])
        fleet.rig.wait_until_up(NODES[2])
        fleet.wait_until_live(ALL_LIVE, 120)
    assert set(releases(fleet).values()) == {before}
    assert {name: found[name] for name in NOTHING} == NOTHING


def test_other_bits_are_announced_and_mixed_with_nothing(fleet: Fleet, source: Path) -> None:
    """Its arithmetic is the same in truth, so that answers can be compared; its rows say they are others."""
    digests = f"cd {fleet.rig.folder}/shared && find . -name '*.kv' -path './*/*' -exec sha256sum {{}} + | sort"
    old = subprocess.run(["sh", "-c", digests], capture_output=True, text=True, check=True).stdout.splitlines()
    assert old
    set_version(source, "0.1.6")
    found: dict[str, Any] = {}
    version = source / "engine/kernels/version.py"
    with edited(version, "NUMERICS_VERSION: Final = ", "NUMERICS_VERSION: Final = 1000 + "), crowd(fleet, 6, found):
        run = roll_out(fleet)
    assert run.returncode == 0, run.output[-4000:]
    assert run.output.index("THE BITS CHANGE") < run.output.index("PLAY [Upgrade the nodes]")
    assert {name: found[name] for name in NOTHING} == NOTHING
    now = subprocess.run(["sh", "-c", digests], capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(old) <= set(now)
    assert len({line.split("/")[1] for line in now}) == 2  # a folder for each fingerprint
