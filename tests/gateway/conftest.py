from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "telemetry"))  # otlp_collector.py
sys.path.insert(0, str(Path(__file__).parent))  # browser_kit.py

from browser_kit import write_drill_report

from kvferry.client import Client
from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.model import DEFAULT_MODEL, ensure_model

START_SECONDS = 60


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[LocalCluster]:
    """Two nodes with the real model; a test that kills one starts it again."""
    ensure_model(DEFAULT_MODEL)
    options = ClusterOptions(
        model=DEFAULT_MODEL, directory=tmp_path_factory.mktemp("cluster"), n_nodes=2, kv_memory="256MiB"
    )
    with LocalCluster(options) as running:
        yield running


@pytest.fixture(scope="session")
def new_gateway(tmp_path_factory) -> Iterator[Callable[..., str]]:
    """Starts gateway processes with these arguments; each one's http://HOST:PORT."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(coordinator: str, *arguments: str) -> str:
        ready = tmp_path_factory.mktemp("gateway") / "ready.json"
        command = [sys.executable, "-m", "kvferry.client.cli", "gateway", "run", "--coordinator", coordinator]
        process = subprocess.Popen([*command, "--listen", "127.0.0.1:0", "--ready-file", str(ready), *arguments])
        processes.append(process)
        return f"http://{wait_ready(ready, process)}"

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(10)


@pytest.fixture(scope="session")
def base_url(cluster, new_gateway) -> str:
    """A gateway process in front of the cluster."""
    return new_gateway(cluster.address)


def wait_ready(path: Path, process: subprocess.Popen[bytes]) -> str:
    """The address that a process tells once it serves."""
    until = time.monotonic() + START_SECONDS
    while not path.exists():
        assert process.poll() is None, "the process ended before it served"
        assert time.monotonic() < until, "the process does not serve in time"
        time.sleep(0.02)
    return json.loads(path.read_text())["address"]


@pytest.fixture
def client(base_url) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, with another base_url and nothing else."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Iterator[LocalCluster]:
    """What `kvferry up` starts: two nodes and a gateway that may kill them; and a drill was run."""
    ensure_model(DEFAULT_MODEL)
    directory = tmp_path_factory.mktemp("up")
    write_drill_report(directory / "drills")
    options = ClusterOptions(
        model=DEFAULT_MODEL, directory=directory, n_nodes=2, kv_memory="256MiB", http_port=0,
        drill_reports=directory / "drills",
    )  # fmt: skip
    with LocalCluster(options) as running:
        with Client(running.address) as client:
            client.create_session().generate("Name a river. " * 8, max_tokens=4).collect()
        yield running
