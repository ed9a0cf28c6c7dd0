"""A deleted conversation's snapshots go, and none that another one has use of."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_kit import Cluster, all_of, code_of, eventually, ids_of, read_while_it_lasts
from registry_kit import outcome, session, turn
from scripted_worker import Script
from test_snapshots import FINGERPRINT, GEOMETRY, VOCABULARY, Zeros

from kvferry.coordinator.conversation import History
from kvferry.coordinator.forgetting import Forgetting, expire
from kvferry.coordinator.memory_registry import Ledger, MemoryRegistry
from kvferry.coordinator.registry import Registry, SessionRecord
from kvferry.coordinator.snapshots import SnapshotView
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.coordinator.tenants import Sharing
from kvferry.coordinator.turns import Turns
from kvferry.proto.v1 import chat_pb2
from kvferry.store.place import StorePlace
from kvferry.store.snapshot_store import SnapshotStore

SYSTEM = tuple(range(64))


class Fixture:
    """A registry of sessions, a store with what nodes saved of them, and who cleans up."""

    def __init__(self, root: Path, registry: Registry) -> None:
        self.root, self.registry = root, registry
        self.view = SnapshotView(StorePlace(str(root)))
        self.forgetting = Forgetting(registry, self.view, Sharing(), lambda: 100)

    async def talk(self, session_id: str, *own: int, tenant: str = "") -> None:
        """A session of the system prompt and tokens of its own, saved after each."""
        prompt = SYSTEM + own
        finished = dataclasses.replace(turn(session_id=session_id, prompt=prompt), outcome=outcome(()))
        made = dataclasses.replace(session(session_id), n_tokens=len(prompt), n_turns=1, tenant=tenant)
        await self.registry.import_session(made, [finished])
        store = SnapshotStore(
            self.root, FINGERPRINT, GEOMETRY, VOCABULARY, 1 << 20, 100, "n", version=3, tenant=tenant
        )  # fmt: skip
        store.reap()
        store.publish(np.array(SYSTEM, np.int32), Zeros())
        if own:
            store.publish(np.array(prompt, np.int32), Zeros())

    async def delete_session(self, session_id: str, only_if: Callable[[SessionRecord], bool] = lambda _: True) -> bool:
        record = await self.registry.get_session(session_id)
        if not only_if(record):
            return False
        history = History.of(await self.registry.list_turns(session_id))
        await self.registry.delete_session(session_id)
        self.forgetting.deleted(record, history)
        return True

    def files(self) -> int:
        return len(list(self.root.rglob("kv3_*.kv")))


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Fixture]:
    fixture = Fixture(tmp_path, await MemoryRegistry(Ledger()).open("c"))
    fixture.view.start()
    fixture.view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    running = asyncio.create_task(fixture.forgetting.run())
    yield fixture
    running.cancel()
    fixture.view.stop()


async def test_a_shared_system_prompt_stays_until_the_last_session_that_has_it_goes(kept: Fixture) -> None:
    for number, session_id in enumerate("ab"):
        await kept.talk(session_id, *range(100 + 50 * number, 140 + 50 * number))
    assert kept.files() == 3
    await kept.delete_session("a")
    await eventually(lambda: kept.files() == 2)
    assert kept.view.longest_prefixes((*SYSTEM, *range(150, 190), 1)) == {FINGERPRINT: 104}
    await kept.delete_session("b")
    await eventually(lambda: kept.files() == 0)


async def test_what_a_shorter_session_still_needs_stays(kept: Fixture) -> None:
    await kept.talk("prompt only")
    await kept.talk("whole", *range(100, 140))
    await kept.delete_session("whole")
    await eventually(lambda: kept.files() == 1)
    assert kept.view.longest_prefixes((*SYSTEM, 1)) == {FINGERPRINT: 64}


async def test_tenants_do_not_keep_each_other_s(kept: Fixture) -> None:
    await kept.talk("ours", tenant="acme")
    await kept.talk("theirs", tenant="other")
    assert kept.files() == 2
    await kept.delete_session("ours")
    await eventually(lambda: kept.files() == 1)


async def test_what_nobody_used_for_long_goes_with_its_snapshots(kept: Fixture) -> None:
    await kept.talk("old", *range(100, 140))
    assert await expire(kept.registry, kept, now_ms=9, before_ms=1) == 0
    assert await expire(kept.registry, kept, now_ms=9, before_ms=2) == 1
    await eventually(lambda: kept.files() == 0)


async def test_deleting_by_rpc_does_it(new_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster: Cluster = await new_cluster(store=str(tmp_path / "store"))
    worker = await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session_id = await client.new_session()
    await all_of(client.generate(session_id))
    token_ids = np.array((await client.get(session_id)).token_ids, np.int32)
    geometry = dataclasses.replace(GEOMETRY, n_layers=30, n_kv_heads=3, head_dim=64)  # as scripted workers have it
    vocab_size, fingerprint = cluster._models[0].text.vocab_size, worker._identity["fingerprint"]
    store = SnapshotStore(tmp_path / "store", fingerprint, geometry, vocab_size, 1 << 30, 100, "n", version=3)
    store.reap()
    store.publish(token_ids[:-1], Zeros())
    await client.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id=session_id))
    await eventually(lambda: not list((tmp_path / "store").rglob("kv3_*.kv")))


async def test_a_session_that_is_used_again_while_it_expires_is_deleted_before_that_or_not_at_all(
    new_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, turns_of_idle_houses: list[Turns]
) -> None:
    cluster: Cluster = await new_cluster()
    await cluster.worker("a", Script(token_seconds=0.1))
    client = cluster.client()
    await client.until_nodes(1)
    session_id = await client.new_session()
    asking: list[asyncio.Task[Any]] = []
    real = SqliteRegistry.get_session

    async def used_meanwhile(self: SqliteRegistry, session_id: str) -> SessionRecord:
        found = await real(self, session_id)
        if not asking:
            asking.append(asyncio.create_task(read_while_it_lasts(client.generate(session_id))))
            await asyncio.wait(asking, timeout=0.4)
        return found

    monkeypatch.setattr(SqliteRegistry, "get_session", used_meanwhile)
    far_ms = 2**60
    n_deleted = await expire(
        turns_of_idle_houses[0]._around.registry, turns_of_idle_houses[0], now_ms=far_ms, before_ms=far_ms
    )
    ((events, error),) = await asyncio.gather(*asking)
    if error is None:
        assert (n_deleted, len(ids_of(events))) == (0, 8)
        assert len((await client.get(session_id)).turns) == 1
    else:
        assert (n_deleted, code_of(error)) == (1, "unknown_session")
