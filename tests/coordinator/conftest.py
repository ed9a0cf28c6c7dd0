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
from registry_kit import Open, open_memory, open_sqlite

from kvferry.coordinator import server
from kvferry.coordinator.etcd.registry import EtcdRegistry
from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.coordinator.registry import Registry
from kvferry.coordinator.snapshots import SnapshotView
from kvferry.coordinator.turns import Turns
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


@pytest.fixture(params=["sqlite", "memory", "etcd"])
async def open_registry(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[Registry] = []
    # asked for only where it is needed: where etcd is not installed, its tests alone are skipped
    members = request.getfixturevalue("etcd").endpoints if request.param == "etcd" else []

    async def open_one() -> Registry:
        match request.param:
            case "sqlite":
                return await open_sqlite(tmp_path)
            case "memory":
                return await open_memory(tmp_path)
        return await EtcdRegistry(members, prefix=tmp_path.name).open("c1")

    async def open_again() -> Registry:
        for registry in opened:
            await registry.close()
        opened[:] = [await open_one()]
        return opened[0]

    yield open_again
    for registry in opened:
        await registry.close()


@pytest.fixture
async def registry(open_registry: Open) -> Registry:
    return await open_registry()


@pytest.fixture
def turns_of_idle_houses(monkeypatch: pytest.MonkeyPatch) -> list[Turns]:
    """The turns of each coordinator that starts; none of them keeps house, so that a test does when it wants to."""
    made: list[Turns] = []

    async def no_housekeeping(registry: Registry, turns: Turns, settings: object) -> None:
        made.append(turns)

    monkeypatch.setattr(server, "keep_house", no_housekeeping)
    return made


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
