"""Promises 27 and 30 on plain processes: a fleet changes node by node, and its release, while people talk to it."""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Final

import platformdirs
import pytest
from talking import Load

from kvferry.drills.cluster import LocalCluster
from kvferry.drills.process import ManagedProcess

from .rig import Control, options, question

pytestmark = pytest.mark.alone  # three nodes, and talkers that load all of them

ROOT: Final = Path(__file__).parents[2]
DRAIN_SECONDS: Final = 60.0
CONVERSATIONS: Final = ([question(20), question(21, 16)], [question(22)], [question(23), question(24, 16)])


def roll(cluster: LocalCluster, name: str) -> float:
    """Drain a node, start it again, wait until it is live; returns how long it took to end."""
    began = time.monotonic()
    assert cluster.nodes[name].stop(DRAIN_SECONDS), f"{name} had to be killed: {cluster.log_of(name)}"
    seconds = time.monotonic() - began
    cluster.start_nodes([name])
    cluster.wait_live(cluster.nodes)
    return seconds


def test_27_three_rolling_restarts_under_load_lose_nothing(cluster: LocalCluster, control: Control) -> None:
    cluster.ensure_all_live()
    with Load(cluster.address, CONVERSATIONS, n_talkers=6) as load:
        seconds = [roll(cluster, name) for name in cluster.nodes]
    assert max(seconds) < DRAIN_SECONDS
    assert load.n_moved
    load.judge(control)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_27_fifty_rolling_restarts_under_load_lose_nothing(cluster: LocalCluster, control: Control) -> None:
    cluster.ensure_all_live()
    names = list(cluster.nodes)
    with Load(cluster.address, CONVERSATIONS, n_talkers=9) as load:
        seconds = [roll(cluster, names[i % len(names)]) for i in range(50)]
    print(f"50 drains, at most {max(seconds):.1f} s; {len(load.held)} conversations, {load.n_moved} turns moved")
    assert max(seconds) < DRAIN_SECONDS
    assert load.n_moved >= 50
    load.judge(control)


@pytest.fixture(scope="session")
def last_release() -> Path:
    """The source tree of the last release, which needs this one's history."""
    commit = (ROOT / "tests/proto/released/COMMIT").read_text().strip()
    folder = platformdirs.user_cache_path("kvferry") / "test-releases" / commit
    if not folder.is_dir():
        archive = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=False)
        if archive.returncode:
            pytest.skip(f"the last release's commit {commit} is not in this clone")
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
    return folder


def of_release(process: ManagedProcess, tree: Path | None) -> None:
    """The next start is of another release; None: this one."""
    process.environment.pop("PYTHONPATH", None)
    if tree is not None:
        process.environment["PYTHONPATH"] = str(tree / "src")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_30_two_neighbouring_releases_serve_together(
    model: str, control: Control, tmp_path: Path, last_release: Path
) -> None:
    """Nodes first, then the coordinator; and then nodes of the last release beside a coordinator of this one."""
    cluster = LocalCluster(options(model, tmp_path))
    for process in cluster.processes:
        of_release(process, last_release)
    with cluster:
        first, second, third = cluster.nodes
        with Load(cluster.address, CONVERSATIONS, n_talkers=6) as load:
            for name in (first, second, third):
                of_release(cluster.nodes[name], None)
                roll(cluster, name)
            of_release(cluster.coordinator, None)
            assert cluster.coordinator.stop()
            cluster.start_coordinator()
            cluster.wait_live(cluster.nodes)
            for name in (first, second):
                of_release(cluster.nodes[name], last_release)
                roll(cluster, name)
        n_of_each = {name: "golden bits" in cluster.log_of(name) for name in cluster.nodes}
        load.judge(control)
        assert load.n_moved
        print(f"{len(load.held)} conversations, {load.n_moved} turns moved, {n_of_each}")
