"""Tenants' prefixes are apart, in what routing knows and what nodes are asked, unless the operator says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio
import numpy as np
import pytest
from cluster_kit import Client, Cluster, all_of, code_of, eventually
from scripted_worker import Script

from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.errors import InvalidName
from kvferry.coordinator.tenants import ALONE, Sharing, marked
from kvferry.proto.v1 import chat_pb2


async def candidate_of(client: Client, session: str, text: str) -> chat_pb2.CandidateNode:
    """What the router knew of the node when a turn came."""
    events = await all_of(client.generate(session, text))
    return next(c for e in events if e.HasField("placed") for c in e.placed.candidates if c.chosen)


async def test_a_node_is_told_whose_rows_a_turn_may_reuse_also_after_a_fork_and_a_restart(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script(end_after=4))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session(tenant="acme")
    await all_of(client.generate(session))
    fork = (await client.stub.ForkSession(chat_pb2.ForkSessionRequest(session_id=session))).session
    assert fork.tenant == "acme"
    await all_of(client.generate(await client.new_session()))
    await cluster.restart()
    client = cluster.client()
    await client.until_nodes(1)
    await all_of(client.generate(fork.session_id))
    assert [request.namespace for request in worker.requests] == ["acme", "", "acme"]


async def test_a_tenants_prompt_is_not_routed_by_what_another_one_left_in_memory(cluster: Cluster) -> None:
    await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    text = "The same question, word for word."
    known = {}
    for tenant in ("acme", "bolt", "", "acme"):
        known[tenant] = await candidate_of(client, await client.new_session(tenant=tenant), text)
    assert known["acme"].n_resident > 8
    assert known["bolt"].n_resident == known[""].n_resident == 0


async def test_tenants_of_one_group_share(new_cluster: Callable[..., Any]) -> None:
    cluster = await new_cluster(share_prefixes=("acme,bolt",))
    worker = await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    for tenant in ("acme", "bolt", "corp"):
        await candidate_of(client, await client.new_session(tenant=tenant), "Hello.")
    assert [request.namespace for request in worker.requests] == ["acme", "acme", "corp"]


async def test_a_tenants_name_is_checked(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="tenant is 'a b'") as error:
        await cluster.client().new_session(tenant="a b")
    assert code_of(error.value) == "invalid_name"


async def test_a_node_with_another_key_is_noticed_and_told_of(
    new_cluster: Callable[..., Any], tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await new_cluster(store=str(tmp_path / "store"))
    await cluster.worker("a", Script(store_seal="plain"))
    await cluster.worker("b", Script(store_seal="keyed 0123456789abcdef"))
    client = cluster.client()
    await client.until_nodes(2)
    nodes = (await client.stub.ListNodes(chat_pb2.ListNodesRequest())).nodes
    assert {node.node_id: node.other_key for node in nodes} == {"a": False, "b": True}
    await eventually(lambda: "node b has another store key than this coordinator" in caplog.text)
    assert "node a has" not in caplog.text


def test_groups_share_and_all_others_are_alone() -> None:
    sharing = Sharing.of(["a, b", "c,d"])
    assert [sharing.namespace(tenant) for tenant in ("a", "b", "c", "d", "e", "")] == ["a", "a", "c", "c", "e", ""]
    assert Sharing.of(["*"]).namespace("a") == Sharing.of(["*"]).namespace("") == ""
    assert ALONE.namespace("a") == "a"


@pytest.mark.parametrize("groups", [("a b",), ("a,",), ("a,b", "b,c")])
def test_what_is_no_group_is_refused_at_the_start(groups: tuple[str, ...]) -> None:
    with pytest.raises((InvalidName, ValueError)):
        Sharing.of(groups)
    with pytest.raises(Exception, match="share_prefixes"):
        CoordinatorSettings(model="m", state="s", share_prefixes=groups)


def test_marked_ids_agree_within_a_namespace_only() -> None:
    ids = np.arange(5, 50, dtype=np.int32)
    assert (marked(ids, "a") == marked(ids, "a")).all()
    assert marked(ids, "a")[0] < 0
    assert marked(ids, "a")[0] != marked(ids, "b")[0]
    assert marked(ids, "") is ids
    assert marked(ids, "a")[0] != marked(ids + 1, "a")[0]
