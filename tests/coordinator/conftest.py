"""Coordinators on real sockets with the real tokenizer, and workers without an engine."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # cluster_kit.py, and scripted_worker.py, which is a program as well

from cluster_kit import Cluster, Processes
from etcd_cluster import BINARY, WHY_NOT, EtcdCluster

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.coordinator.snapshots import SnapshotView
from kvferry.store.place import StorePlace


@pytest.fixture(scope="session")
def model(smollm2_path: Path) -> LoadedModel:
    return LoadedModel.load(str(smollm2_path))


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member for all tests; each uses a prefix of its own."""
    if BINARY is None:
        pytest.skip(WHY_NOT)
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def view(tmp_path: Path) -> Iterator[SnapshotView]:
    """What a coordinator knows of the store in tmp_path."""
    made = SnapshotView(StorePlace(str(tmp_path)))
    made.start()
    yield made
    made.stop()


@pytest.fixture
async def new_cluster(tmp_path: Path, model: LoadedModel) -> AsyncIterator[Callable[..., Any]]:
    """Starts clusters with the settings given; all are stopped at the end."""
    clusters: list[Cluster] = []

    async def start(**settings: Any) -> Cluster:
        cluster = Cluster(
            tmp_path / f"state{len(clusters)}", *settings.pop("models", [settings.pop("model", model)]), **settings
        )
        clusters.append(cluster)
        await cluster.start()
        return cluster

    yield start
    for cluster in clusters:
        await cluster.close()


@pytest.fixture
async def cluster(new_cluster: Callable[..., Any]) -> Cluster:
    return await new_cluster()


@pytest.fixture
def processes(tmp_path: Path, smollm2_path: Path, model: LoadedModel) -> Iterator[Processes]:
    running = Processes(tmp_path, smollm2_path, model)
    yield running
    running.close()
