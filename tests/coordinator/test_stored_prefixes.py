"""What an operator is told of the store: who shares what, how large and how old, and nothing of what is said in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_kit import Cluster, all_of
from scripted_worker import Script
from test_snapshots import FINGERPRINT, GEOMETRY, VOCABULARY, Zeros, drained

from kvferry.coordinator.errors import BadRequest
from kvferry.coordinator.snapshots import SnapshotView
from kvferry.coordinator.stored_prefixes import MAX_PREFIXES, list_snapshots, stored_rows
from kvferry.proto.v1 import chat_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2
from kvferry.store.geometry import KvGeometry
from kvferry.store.snapshot_store import SnapshotStore

SYSTEM = list(range(100, 164))


class Writer:
    """Saves as a node does: each continuation in a segment of its own."""

    def __init__(self, root: Path, tenant: str = "") -> None:
        self.store = SnapshotStore(
            root, FINGERPRINT, GEOMETRY, VOCABULARY, 1 << 22, 1000, "n", version=3, tenant=tenant
        )  # fmt: skip
        self.store.reap()

    def save(self, token_ids: list[int]) -> str:
        return self.store.publish(np.array(token_ids, np.int32), Zeros()).name


def listed(view: SnapshotView, **asked: Any) -> chat_pb2.ListSnapshotsResponse:
    return list_snapshots(view.indexes(), chat_pb2.ListSnapshotsRequest(**asked))


def test_conversations_that_begin_alike_share_the_run_that_they_have_in_common(view: SnapshotView, tmp_path: Path):
    writer = Writer(tmp_path)
    first = writer.save([*SYSTEM, *range(32)])
    second = writer.save([*SYSTEM, *range(200, 264)])
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    tree = listed(view)
    assert (tree.n_snapshots, tree.n_bytes) == (2, view.n_bytes)
    system, *branches = tree.prefixes
    assert (system.start, system.end, system.n_snapshots, system.n_children) == (0, 64, 2, 2)
    assert (system.parent_id, list(system.files)) == ("", [])
    assert {branch.parent_id for branch in branches} == {system.id}
    by_end = {branch.end: branch for branch in branches}
    assert [file.name for file in by_end[96].files] == [first]
    (forked,) = by_end[128].files
    assert (forked.name, forked.start, forked.end) == (second, 64, 128), "it goes on from the other one's rows"
    assert forked.n_bytes == (writer.store.path / second).stat().st_size
    assert forked.used_at_ms == (writer.store.path / second).stat().st_mtime_ns // 1_000_000


def test_what_did_not_fit_is_told_below_its_prefix(view: SnapshotView, tmp_path: Path):
    writer = Writer(tmp_path)
    for last in range(5):
        writer.save([*SYSTEM, *[last] * 32])
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    cut = listed(view, max_prefixes=3)
    assert [prefix.n_children for prefix in cut.prefixes] == [5, 0, 0]
    below = listed(view, below=cut.prefixes[0].id)
    assert {prefix.parent_id for prefix in below.prefixes} == {cut.prefixes[0].id}
    assert len(below.prefixes) == 5
    assert len(listed(view, max_prefixes=1_000_000).prefixes) == 6 <= MAX_PREFIXES


def test_a_prefix_that_is_gone_has_nothing_below_it_and_a_made_up_one_is_refused(view: SnapshotView, tmp_path: Path):
    Writer(tmp_path).save([*SYSTEM, 1])
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    assert not listed(view, below=f"{FINGERPRINT}//kv3_{'0' * 32}.kv/64").prefixes
    assert not listed(view, below=listed(view).prefixes[0].id.replace("/65", "/3")).prefixes
    with pytest.raises(BadRequest, match="ListSnapshots"):
        listed(view, below="<script>")


def test_tenants_have_trees_of_their_own_and_each_gets_room(view: SnapshotView, tmp_path: Path):
    for tenant in ("", "acme"):
        writer = Writer(tmp_path, tenant)
        for last in range(4):
            writer.save([*SYSTEM, *[last] * 32])
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    view.longest_prefixes(SYSTEM, namespace="acme")
    drained(view)
    tree = listed(view, max_prefixes=4)
    assert [prefix.namespace for prefix in tree.prefixes] == ["", "", "acme", "acme"]
    assert tree.n_snapshots == 8


def test_a_session_lies_in_a_chain_of_files(view: SnapshotView, tmp_path: Path):
    writer = Writer(tmp_path)
    tokens: list[int] = []
    names = [writer.save(tokens := [*tokens, *[turn] * 40]) for turn in range(3)]
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    (rows,) = stored_rows(view.indexes(), "", np.array([*tokens, 7, 8, 9], np.int32), ())
    assert (rows.fingerprint, rows.n_tokens) == (FINGERPRINT, 120)
    assert [(file.name, file.start, file.end) for file in rows.files] == [
        (names[0], 0, 40), (names[1], 40, 80), (names[2], 80, 120)
    ]  # fmt: skip
    assert stored_rows(view.indexes(), "acme", np.array(tokens, np.int32), ()) == []


async def test_an_operator_sees_where_a_session_lies(new_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster: Cluster = await new_cluster(store=str(tmp_path / "store"))
    worker = await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session_id = await client.new_session()
    await all_of(client.generate(session_id))
    token_ids = np.array((await client.get(session_id)).token_ids, np.int32)
    vocab_size, fingerprint = cluster._models[0].text.vocab_size, worker._identity["fingerprint"]
    geometry = KvGeometry(n_layers=30, n_kv_heads=3, head_dim=64)  # as scripted workers have it
    store = SnapshotStore(
        tmp_path / "store", fingerprint, geometry, vocab_size, 1 << 30, 100, "n", version=3
    )  # fmt: skip
    store.reap()
    name = store.publish(token_ids[:-1], Zeros()).name
    published = [worker_pb2.SnapshotInfo(name=name, fingerprint=fingerprint)]
    await fleet_pb2_grpc.FleetServiceStub(client.channel).Heartbeat(  # type: ignore[no-untyped-call]
        fleet_pb2.HeartbeatRequest(
            node_id="a", boot_id=worker.boot_id, load=worker._load(), resident=worker._resident(), published=published
        )
    )

    async def located() -> chat_pb2.LocateSessionResponse:
        return await client.stub.LocateSession(chat_pb2.LocateSessionRequest(session_id=session_id))

    while not (where := await located()).stored:  # noqa: ASYNC110 - a thread takes it in
        await asyncio.sleep(0.02)
    assert where.n_tokens == len(token_ids)
    assert [(rows.node_id, rows.n_tokens) for rows in where.resident] == [("a", len(token_ids) - 1)]
    assert [[file.name for file in rows.files] for rows in where.stored] == [[name]]
    tree = await client.stub.ListSnapshots(chat_pb2.ListSnapshotsRequest())
    assert [prefix.files[0].name for prefix in tree.prefixes] == [name]
