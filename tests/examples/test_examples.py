"""Each example is run as its own text says, against a real cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.model import DEFAULT_MODEL, ensure_model
from kvferry.engine.files.catalogue import cache_root

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[LocalCluster]:
    ensure_model(DEFAULT_MODEL)
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(
        ClusterOptions(model=DEFAULT_MODEL, directory=directory, n_nodes=1, kv_memory="256MiB")
    ) as running:
        yield running


@pytest.fixture(scope="module")
def node_example(tmp_path_factory) -> Path:
    """The folder of the Node example, in a tree of its own; what its package.json names is installed once, into the
    user's cache."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not here: the Node example was not run")
    packages = cache_root() / "tests" / "node-grpc"
    packages.mkdir(parents=True, exist_ok=True)
    shutil.copy(EXAMPLES / "node" / "package.json", packages)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefer-offline"]
    installed = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=120, check=False)
    if installed.returncode:
        pytest.skip(f"npm cannot install @grpc/grpc-js here: {installed.stderr.strip()[-200:]}")
    tree = tmp_path_factory.mktemp("tree")
    (tree / "src").symlink_to(ROOT / "src")  # the example finds the protos beside itself
    folder = tree / "examples" / "node"
    folder.mkdir(parents=True)
    shutil.copy(EXAMPLES / "node" / "chat.mjs", folder)
    (folder / "node_modules").symlink_to(packages / "node_modules")
    return folder


def run(command: list[str], folder: Path) -> str:
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def assert_tells_it_all(output: str) -> None:
    """It hung up in mid-answer, has every token once all the same, and its last answer ended by the deadline."""
    assert re.search(r"hung up after 10 tokens", output), output
    assert re.search(r"40 tokens, each of them once", output), output
    ended = re.search(r"ended with FINISH_REASON_DEADLINE after (\d+) tokens", output)
    assert ended, output
    assert 0 < int(ended[1]) < 400


@pytest.mark.parametrize("name", ["python_sync.py", "python_asyncio.py"])
def test_the_python_examples_stream_reconnect_and_keep_a_deadline(cluster, name):
    assert_tells_it_all(run([sys.executable, str(EXAMPLES / name), cluster.address], ROOT))


def test_the_node_example_streams_reconnects_and_keeps_a_deadline(cluster, node_example):
    assert_tells_it_all(run(["node", "chat.mjs", cluster.address], node_example))


def test_the_shell_example_needs_nothing_but_reflection(cluster):
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    if buf is None:
        pytest.skip("buf is not here (pip install buf-bin): the shell example was not run")
    command = ["env", f"PATH={Path(buf).parent}:/usr/bin:/bin", str(EXAMPLES / "shell.sh"), cluster.address]
    assert_tells_it_all(run(command, ROOT))
