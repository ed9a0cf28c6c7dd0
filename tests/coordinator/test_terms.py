"""What a request says of its place and its time: priority, and when nobody needs the answer any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import Cluster, all_of, code_of, eventually, ids_of, take_tokens
from scripted_worker import Script

from kvferry.coordinator.admission import Admission
from kvferry.proto.v1 import chat_pb2, common_pb2

DEADLINE = common_pb2.FINISH_REASON_DEADLINE


async def test_a_turn_ends_at_its_time_with_the_tokens_it_has_and_the_node_stops(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.02))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    asked = time.monotonic()
    events = await all_of(client.generate(session, max_tokens=2_000, timeout_seconds=0.5))
    assert 0.4 < time.monotonic() - asked < 10
    assert events[-1].finished.reason == DEADLINE
    assert 0 < len(ids_of(events)) < 100
    await eventually(lambda: worker.n_running == 0)
    await eventually(lambda: [s.session_id for s in worker.stopped] == [session])  # a call of its own
    assert list((await client.get(session)).token_ids)[-len(ids_of(events)) :] == ids_of(events)  # they are kept
    assert ids_of(await all_of(client.generate(session, "Go on")))


async def test_the_deadline_of_the_call_is_the_turn_s(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.02))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    request = chat_pb2.GenerateRequest(
        session_id=session, turn_id="t", max_tokens=2_000, messages=[chat_pb2.ChatMessage(role="user", content="Hi")]
    )
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in client.stub.Generate(request, timeout=0.5):
            pass
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: worker.n_running == 0)
    events = await all_of(client.resume(session, "t"))
    assert events[-1].finished.reason == DEADLINE


async def test_a_deadline_outlives_the_coordinator(new_cluster: Callable[..., Any]) -> None:
    cluster = await new_cluster(no_node_wait=30.0)
    client = cluster.client()
    session = await client.new_session()
    call = client.generate(session, turn_id="t", timeout_seconds=1.0)
    assert (await anext(call)).HasField("started")
    await cluster.restart()
    events = await all_of(cluster.client().resume(session, "t"))  # no node ever came
    assert events[-1].finished.reason == DEADLINE


async def test_the_node_s_call_has_the_deadline_too(cluster: Cluster) -> None:
    """So that a node which its coordinator cannot reach any more stops as well."""
    worker = await cluster.worker("a", Script(token_seconds=0.02))
    client = cluster.client()
    await client.until_nodes(1)
    events = client.generate(await client.new_session(), max_tokens=100, timeout_seconds=30)
    await take_tokens(events, 1)
    assert 20 < worker.times_left[0] <= 31
    message = chat_pb2.ChatMessage(role="user", content="Hi")
    request = chat_pb2.GenerateRequest(session_id=await client.new_session(), max_tokens=2, messages=[message])
    async for _ in client.stub.Generate(request):
        pass
    assert worker.times_left[-1] is None


async def test_the_node_is_told_the_priority(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    await all_of(client.generate(await client.new_session(), priority=-7))
    assert [r.priority for r in worker.requests] == [-7]


async def test_a_node_that_comes_back_gets_the_waiting_turns_by_priority_and_then_age(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    await all_of(client.generate(await client.new_session()))  # the connection is open from now on
    worker.requests.clear()
    worker.script.mute = True
    await client.until_nodes(0)
    sessions: dict[str, int] = {}
    reading = []
    for priority in (0, -5, 3, 0, 100):
        session = await client.new_session()
        sessions[session] = priority
        events = client.generate(session, priority=priority)
        assert (await anext(events)).HasField("started")
        reading.append(events)
    worker.script.mute = False
    await eventually(lambda: len(worker.requests) == len(sessions))
    order = [r.session_id for r in worker.requests]
    by_rank = sorted(sessions, key=lambda s: (-sessions[s], list(sessions).index(s)))
    assert order == by_rank


async def test_whoever_asks_in_the_same_moment_goes_on_in_order() -> None:
    admission = Admission()
    order: list[str] = []

    async def turn(name: str, priority: int) -> None:
        arrival = admission.arrival()
        for _ in range(2):
            await admission.place(priority, arrival)
            order.append(name)

    tasks = [asyncio.create_task(turn(name, p)) for name, p in (("old", 0), ("low", -1), ("new", 0), ("high", 9))]
    await asyncio.sleep(0)
    gone = asyncio.create_task(admission.place(50, admission.arrival()))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*tasks)
    assert order == ["high", "old", "new", "low"] * 2


async def test_what_cannot_be_is_refused(cluster: Cluster) -> None:
    client = cluster.client()
    session = await client.new_session()
    for field, value, says in (
        ("priority", 101, r"priority is 101: give a whole number in \[-100, 100\]"),
        ("priority", -101, "priority is -101"),
        ("timeout_seconds", -1.0, "timeout_seconds is -1: give 0, for none, to"),
        ("timeout_seconds", float("nan"), "timeout_seconds is nan"),
        ("timeout_seconds", float("inf"), "timeout_seconds is inf"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=says) as error:
            await all_of(client.generate(session, **{field: value}))
        assert code_of(error.value) == "invalid_request"
