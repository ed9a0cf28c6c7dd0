"""A supervisor restarts what dies, tells how it died, and does not do so for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.drills.errors import ProcessFailed
from kvferry.drills.supervisor import STEADY_S, TRIES_MAX, Supervisor


class Process:
    def __init__(self, name: str) -> None:
        self.name, self.pid, self.log_file = name, 100, Path(f"{name}.log")
        self.is_running, self.is_ready = True, True

    def how_it_ended(self) -> str:
        return "was killed by SIGKILL"

    def wait_gone(self, timeout_s: float) -> bool:
        return not self.is_running

    def die(self) -> None:
        self.is_running = self.is_ready = False


class Cluster:
    def __init__(self) -> None:
        self.processes = [Process("node-1"), Process("coordinator")]
        self.begun: list[str] = []

    def begin(self, name: str) -> None:
        self.begun.append(name)
        process = next(p for p in self.processes if p.name == name)
        process.is_running, process.pid = True, process.pid + 1


class Watch:
    def __init__(self) -> None:
        self.cluster, self.said, self.clock = Cluster(), [], 0.0
        self.supervisor = Supervisor(self.cluster, self.said.append, lambda: self.clock)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        self.clock += seconds
        self.supervisor.step()


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.mark.parametrize("index", [0, 1])
def test_what_dies_is_started_again_and_told(watch, index):
    process = watch.cluster.processes[index]
    watch.pass_time(1)
    assert watch.said == []
    process.die()
    watch.pass_time(0.1)
    assert watch.said == [f"{process.name} was killed by SIGKILL; starting it again in 1 s"]
    watch.pass_time(0.5)
    assert watch.cluster.begun == []
    watch.pass_time(0.6)
    assert watch.cluster.begun == [process.name]
    watch.pass_time(0.1)
    assert len(watch.said) == 1  # it does not serve yet
    process.is_ready = True
    watch.pass_time(0.1)
    assert watch.said[1:] == [f"{process.name} serves again, pid 101"]
    watch.pass_time(1)
    assert len(watch.said) == 2


def test_one_that_cannot_live_is_left_alone_and_the_others_are_not(watch):
    node, coordinator = watch.cluster.processes
    for _ in range(TRIES_MAX):
        node.die()
        watch.pass_time(0.1)
        watch.pass_time(40)
    node.die()
    watch.pass_time(0.1)
    assert watch.cluster.begun == ["node-1"] * TRIES_MAX
    waits = [line.rpartition(" in ")[2] for line in watch.said[:-1]]
    assert waits == ["1 s", "2 s", "4 s", "8 s", "16 s"]
    assert "left alone (log: node-1.log)" in watch.said[-1]
    watch.pass_time(100)
    assert len(watch.cluster.begun) == TRIES_MAX
    coordinator.die()
    watch.pass_time(0.1)
    watch.pass_time(2)
    assert watch.cluster.begun[-1] == "coordinator"


def test_one_that_had_recovered_gets_all_its_tries_again(watch):
    node = watch.cluster.processes[0]
    for _ in range(3 * TRIES_MAX):
        node.die()
        watch.pass_time(0.1)
        watch.pass_time(2)
        node.is_ready = True
        watch.pass_time(0.1)
        watch.pass_time(STEADY_S)
    assert len(watch.cluster.begun) == 3 * TRIES_MAX
    assert all("in 1 s" in line or "serves again" in line for line in watch.said)


def test_it_ends_when_nothing_can_live(watch):
    for _ in range(TRIES_MAX):
        for process in watch.cluster.processes:
            process.die()
        watch.pass_time(0.1)
        watch.pass_time(40)
    for process in watch.cluster.processes:
        process.die()
    with pytest.raises(ProcessFailed, match="could not be started again"):
        watch.pass_time(0.1)
