"""A process that dies of a full disk cannot say so: its log lies there as well. Who started it says it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.disk import why_full
from kvferry.drills.errors import DirectoryBusy, ProcessFailed
from kvferry.drills.supervisor import Supervisor

STAND_IN = """
import json, os, sys, time
import kvferry.client.cli as cli
def main(arguments):
    ready = arguments[arguments.index("--ready-file") + 1]
    try:
        with open(ready + ".new", "w") as file:
            json.dump({"address": "127.0.0.1:1", "pid": os.getpid()}, file)
        os.rename(ready + ".new", ready)
    except OSError as error:
        print(f"error: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(1)
    time.sleep(60)
cli.main = main
"""
"""Of every process: writes what says that it serves, and serves nothing."""


@pytest.fixture
def cluster(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ClusterOptions(model="m", directory=small_disk / "up", n_nodes=2, starts_whole=False)
    cluster = LocalCluster(options)
    monkeypatch.setattr(cluster, "wait_live", lambda _names: None)  # there is nobody who could be asked
    yield cluster
    cluster.stop()


def fill(disk: Path) -> Path:
    """Every byte of it; what is returned is to be deleted to have room again."""
    filling = disk / "filling"
    with filling.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 20)):
                pass
        except OSError:
            pass
    assert os.statvfs(disk).f_bavail == 0
    return filling


def test_the_first_to_die_is_told_with_the_disk_and_its_free_bytes(cluster, small_disk):
    fill(small_disk)
    with pytest.raises(ProcessFailed) as caught:
        cluster.start()
    assert str(caught.value) == (
        f"coordinator did not start: the disk of {small_disk}/up/logs is full, with 0 bytes free: make room there, or "
        f"use a folder on another disk (log: {small_disk}/up/logs/coordinator.log)"
    )
    assert caught.value.exit_code == 1


def test_a_later_node_is_tried_again_and_the_others_stay(cluster, small_disk, monkeypatch):
    begin = cluster.begin
    filling: list[Path] = []

    def begin_on_a_full_disk(name: str) -> None:
        if name == "node-2" and not filling:
            filling.append(fill(small_disk))
        begin(name)

    monkeypatch.setattr(cluster, "begin", begin_on_a_full_disk)
    cluster.start()
    assert [p.name for p in cluster.processes if p.is_running] == ["node-1", "coordinator"]
    said: list[str] = []
    clock = [0.0]
    supervisor = Supervisor(cluster, said.append, lambda: clock[0])
    supervisor.step()
    (line,) = said
    assert line == (
        f"node-2 ended by itself with exit code 1 (the disk of {small_disk}/up/logs is full, with 0 bytes free: make "
        "room there, or use a folder on another disk); starting it again in 1 s"
    )
    filling[0].unlink()
    clock[0] = 2.0
    supervisor.step()
    cluster.nodes["node-2"].wait_ready(20)
    supervisor.step()
    assert said[1:] == [f"node-2 serves again, pid {cluster.nodes['node-2'].pid}"]


def test_one_whose_log_cannot_even_be_made_is_tried_again_too(cluster, small_disk):
    cluster.start()
    node = cluster.nodes["node-2"]
    node.kill()
    node.log_file.unlink()
    node.log_file.mkdir()
    said: list[str] = []
    clock = [0.0]
    supervisor = Supervisor(cluster, said.append, lambda: clock[0])
    supervisor.step()
    clock[0] = 2.0
    supervisor.step()
    assert said[1:] == [f"node-2 could not be started ({node.log_file}: is a directory); starting it again in 2 s"]
    node.log_file.rmdir()
    clock[0] = 5.0
    supervisor.step()
    node.wait_ready(20)


def test_a_disk_without_a_file_more_is_full_as_well(small_disk):
    (small_disk / "d").mkdir()
    n_files = 0
    try:
        while True:
            (small_disk / "d" / f"{n_files}").touch()
            n_files += 1
    except OSError:
        pass
    assert "free and no file more: make room there" in why_full(small_disk)
    with pytest.raises(DirectoryBusy, match=r"is full, with .* bytes free and no file more"):
        LocalCluster(ClusterOptions(model="m", directory=small_disk / "up"))
    (small_disk / "d" / "0").unlink()
    assert why_full(small_disk) is None


@pytest.mark.parametrize("command", ["coordinator", "gateway"])
def test_started_by_hand_it_says_so_itself(small_disk, tmp_path, smollm2_path, command):
    """Where it serves is the first thing that a gateway writes; a coordinator's registry lies on another disk here."""
    fill(small_disk)
    own = {
        "coordinator": ["--model", str(smollm2_path), "--state", str(tmp_path / "state")],
        "gateway": ["--coordinator", "127.0.0.1:1"],
    }[command]
    ready = small_disk / "ready"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "kvferry.client.cli", command, "run", "--listen", "127.0.0.1:0", *own),
            *("--ready-file", str(ready)),
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert line == (
        f"error: the ready file {ready} cannot be written: no space left on device, its disk has 0 bytes free: make "
        "room there"
    )
