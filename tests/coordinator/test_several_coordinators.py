"""Two coordinators over one etcd: any of them serves any session, and each goes on with what the other leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import (
    Cluster,
    all_of,
    code_of,
    eventually,
    ids_of,
    read_while_it_lasts,
    resume_until_served,
    take_tokens,
    until,
)
from etcd_cluster import EtcdCluster
from scripted_worker import Script, ScriptedWorker, scripted_answer

from kvferry.coordinator.etcd.registry import EtcdRegistry
from kvferry.coordinator.server import LoadedModel
from kvferry.engine.text.model import ChatMessage

NewPair = Callable[..., Awaitable[tuple[Cluster, Cluster]]]


@pytest.fixture
async def pair(etcd: EtcdCluster, tmp_path: Path, new_cluster: Callable[..., Any]) -> tuple[Cluster, Cluster]:
    """Their lease in etcd is as short as etcd allows."""
    registry = f"{etcd.url}/{tmp_path.name}"
    return await new_cluster(registry=registry), await new_cluster(registry=registry)


@pytest.fixture
async def worker(pair: tuple[Cluster, Cluster]) -> ScriptedWorker:
    """Known to both."""
    a, b = pair
    made = await a.worker("n", Script(token_seconds=0.02), coordinator=f"{a.address},{b.address}")
    for cluster in pair:
        await cluster.client().until_nodes(1)
    return made


def whole_answer(model: LoadedModel, n_tokens: int, text: str = "Hi") -> list[int]:
    return scripted_answer(model.text.first_turn([ChatMessage("user", text)]), 0, n_tokens)


async def test_a_conversation_goes_on_at_any_coordinator(
    pair: tuple[Cluster, Cluster], worker: ScriptedWorker, model: LoadedModel
) -> None:
    a, b = (cluster.client() for cluster in pair)
    session = await a.new_session()
    first = await all_of(a.generate(session, "Hi", turn_id="one"))
    assert ids_of(first) == whole_answer(model, 8)
    assert await all_of(b.resume(session, "one")) == first
    await all_of(b.generate(session, "More", turn_id="two"))
    told = [await client.get(session) for client in (a, b)]
    assert [len(t.turns) for t in told] == [2, 2]
    assert told[0].token_ids == told[1].token_ids
    assert [request.epoch for request in worker.requests] == [1, 2]
    assert (await a.status()).coordinator_id == (await b.status()).coordinator_id


async def test_a_running_turn_is_read_and_cancelled_through_any_coordinator(
    pair: tuple[Cluster, Cluster], worker: ScriptedWorker, model: LoadedModel
) -> None:
    a, b = (cluster.client() for cluster in pair)
    session = await a.new_session()
    at_a = a.generate(session, "Hi", max_tokens=2_000)
    first = await take_tokens(at_a, 5)
    at_b = b.resume(session, from_index=3)
    tokens = [event async for event in until_n_tokens(at_b, 10)]
    assert [event.sequence for event in tokens] == list(range(3, 13))
    assert first + [event.token.token_id for event in tokens][2:] == whole_answer(model, 13)
    assert len(worker.requests) == 1  # it was not taken over
    _, error = await read_while_it_lasts(b.resume(session, from_index=5_000))
    assert error is not None
    assert code_of(error) == "index_out_of_range"  # the other one's word, passed on
    _, error = await read_while_it_lasts(b.generate(session, "Me too"))
    assert error is not None
    assert code_of(error) == "session_busy"
    await b.cancel(session)
    for rest in (await all_of(at_a), await all_of(at_b)):
        assert rest[-1].finished.reason == 4
    assert (await b.get(session)).session.open_turn_id == ""


async def test_a_session_with_a_turn_elsewhere_can_be_deleted(
    pair: tuple[Cluster, Cluster], worker: ScriptedWorker
) -> None:
    a, b = (cluster.client() for cluster in pair)
    session = await a.new_session()
    await take_tokens(a.generate(session, "Hi", max_tokens=2_000), 2)
    await b.delete(session)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await a.get(session)
    assert code_of(caught.value) == "unknown_session"


async def test_what_a_coordinator_leaves_is_gone_on_with_by_the_one_the_client_comes_to(
    pair: tuple[Cluster, Cluster], worker: ScriptedWorker, model: LoadedModel
) -> None:
    a, b = (cluster.client() for cluster in pair)
    session = await a.new_session()
    stream = a.generate(session, "Hi", max_tokens=60)
    first = await take_tokens(stream, 5)
    await pair[0].stop()
    more, error = await read_while_it_lasts(stream)
    assert error is not None
    first += ids_of(more)
    rest = await resume_until_served(b, session, len(first))
    assert first + ids_of(rest) == whole_answer(model, 60)
    assert worker.requests[-1].epoch == 2


async def test_what_a_coordinator_leaves_is_ended_by_the_other_though_nobody_asks(
    pair: tuple[Cluster, Cluster], worker: ScriptedWorker, model: LoadedModel
) -> None:
    a, b = (cluster.client() for cluster in pair)
    session = await a.new_session()
    await take_tokens(a.generate(session, "Hi", max_tokens=30), 5)
    await pair[0].stop()

    async def is_finished() -> bool:
        return (await b.get(session)).session.open_turn_id == ""

    await until(is_finished)
    assert ids_of(await all_of(b.resume(session))) == whole_answer(model, 30)


async def test_a_coordinator_that_was_taken_for_dead_lets_go_of_its_turn(
    pair: tuple[Cluster, Cluster], worker: ScriptedWorker, model: LoadedModel
) -> None:
    a, b = (cluster.client() for cluster in pair)
    session = await a.new_session()
    stream = a.generate(session, "Hi", max_tokens=500)
    first = await take_tokens(stream, 5)
    lease = pair[0].registry._lease
    lease._beating.cancel()  # it is cut off from etcd for longer than its lease
    await eventually(lambda: len(worker.requests) == 2)  # the other one's housekeeping takes the turn up
    worker.script.token_seconds = 0.0  # both have gone on long enough beside each other
    lease._beating = asyncio.create_task(lease._run())
    more, error = await read_while_it_lasts(stream)
    first += ids_of(more)
    if error is not None:  # the other one was faster
        assert code_of(error) == "draining"
        first += ids_of(await resume_until_served(a, session, len(first)))
    assert first == whole_answer(model, 500)
    assert ids_of(await all_of(b.resume(session))) == first
    turns = (await b.get(session)).turns
    assert [(t.n_answer_tokens, t.state) for t in turns] == [(500, 3)]


async def test_a_turn_that_another_one_takes_while_it_is_cancelled_is_not_said_to_be_cancelled(
    new_cluster: Callable[..., Any], etcd: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Cluster = await new_cluster(registry=f"{etcd.url}/{tmp_path.name}")
    await cluster.worker("n", Script(token_seconds=0.02))
    a = cluster.client()
    await a.until_nodes(1)
    session = await a.new_session()
    stream = a.generate(session, "Hi", turn_id="t", max_tokens=150)
    await take_tokens(stream, 2)
    other = await EtcdRegistry(etcd.endpoints, tmp_path.name).open("c")
    finish = EtcdRegistry.finish_turn

    async def be_overtaken(self: EtcdRegistry, *what: Any) -> None:
        await other.announce(cluster.address)  # who is said to serve there is taken for dead
        await other.claim_turn(session, "t")
        await other.announce("127.0.0.1:1")
        await finish(self, *what)

    monkeypatch.setattr(EtcdRegistry, "finish_turn", be_overtaken)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await a.cancel(session)
    assert code_of(error.value) == "turn_elsewhere"
    assert (await a.get(session)).session.open_turn_id == "t"
    await other.close()


async def until_n_tokens(events: AsyncIterator[Any], n: int) -> AsyncIterator[Any]:
    async for event in events:
        if event.HasField("token"):
            yield event
            n -= 1
            if n == 0:
                return
