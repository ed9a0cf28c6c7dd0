"""`kvferry kv rm --session`: what goes is what the session alone uses, by what the coordinator knows of the others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvferry.client.kv import kv
from kvferry.proto.v1 import chat_pb2
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore
from kvferry.store.vlkv3 import ContentSpan

from .scripted_coordinator import ScriptedCoordinator

GEOMETRY = KvGeometry(1, 1, 8)
IDS = list(range(1, 101))


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path, "feed", GEOMETRY, 1024, 1 << 20, 100, "node-1", version=3)


def publish(store: SnapshotStore, ids: list[int], **options: object) -> None:
    store.publish(np.array(ids, np.int32), MemoryRows.empty(GEOMETRY, len(ids)), **options)


def add(coordinator: ScriptedCoordinator, name: str, ids: list[int]) -> None:
    coordinator.sessions[name] = chat_pb2.Session(session_id=name, model="m", n_tokens=len(ids))
    coordinator.token_ids[name] = ids


async def rm(coordinator: ScriptedCoordinator, store: SnapshotStore, *arguments: str) -> Result:
    command = ["rm", str(store.path.parent), "--coordinator", f"127.0.0.1:{coordinator.port}", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, kv, command)


async def test_a_sessions_own_segments_go_and_what_another_session_shares_stays(
    coordinator: ScriptedCoordinator, store: SnapshotStore
) -> None:
    for n in (40, 70, 100):
        publish(store, IDS[:n])
    add(coordinator, "mine", IDS)
    add(coordinator, "fork", [*IDS[:50], 7])  # it has saved nothing yet
    add(coordinator, "empty", [])
    result = await rm(coordinator, store, "--session", "mine", "--json")
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["removed"]) == 1
    store.refresh()
    assert store.find(IDS).n_common == 70
    del coordinator.sessions["fork"]
    assert "removed" in (await rm(coordinator, store, "--session", "mine")).output
    assert not list(store.path.glob("kv3_*"))
    assert "nothing to remove" in (await rm(coordinator, store, "--session", "mine")).output


async def test_pictures_are_told_apart(coordinator: ScriptedCoordinator, store: SnapshotStore) -> None:
    cat, dog = (bytes([n]) * 32 for n in (1, 2))
    publish(store, IDS, spans=[ContentSpan(10, 5, cat)])
    for name, content in (("about-dogs", dog), ("about-cats", cat)):
        add(coordinator, name, IDS)
        coordinator.images[name] = chat_pb2.Image(content_hash=content.hex(), start=10, n_tokens=5)
    assert "nothing to remove" in (await rm(coordinator, store, "--session", "about-dogs")).output
    del coordinator.sessions["about-dogs"]  # it shares the tokens before the picture
    assert "removed" in (await rm(coordinator, store, "--session", "about-cats")).output


async def test_a_session_that_nobody_knows_removes_nothing(
    coordinator: ScriptedCoordinator, store: SnapshotStore
) -> None:
    publish(store, IDS)
    result = await rm(coordinator, store, "--session", "nobody")
    assert "unknown_session" in str(result.exception)
    assert len(list(store.path.glob("kv3_*"))) == 1


async def test_one_way_to_say_what_goes_at_a_time(coordinator: ScriptedCoordinator, store: SnapshotStore) -> None:
    publish(store, IDS)
    for arguments in ((), ("--session", "a", "--tokens", "1"), ("--session", "a", "--name", "kv_0123456789abcdef.kv")):
        refused = await rm(coordinator, store, *arguments)
        assert (refused.exit_code, "give one of --name, --tokens and --session" in refused.output) == (2, True)
    tokens = ",".join(map(str, IDS))
    assert (await rm(coordinator, store, "--tokens", tokens)).exit_code == 0
    assert not list(store.path.glob("kv3_*"))
