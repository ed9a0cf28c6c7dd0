"""Several answers to one request: each is a turn of its own, in a fork, with a seed of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import PATIENCE_S, Client, Cluster, all_of, code_of, eventually, ids_of
from scripted_worker import Script

from kvferry.client.sdk import AsyncClient, ConnectionLost, FinishReason, Token
from kvferry.coordinator.errors import RegistryUnavailable
from kvferry.coordinator.registry import TurnRecord
from kvferry.coordinator.samples import sample_session
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.coordinator.turns import Turns
from kvferry.proto.v1 import chat_pb2, common_pb2

N = 4


def ask(client: Client, session: str, **fields: Any) -> Any:
    """The call; its responses say whose event each is."""
    return client.stub.Generate(
        chat_pb2.GenerateRequest(
            session_id=session, turn_id="t", messages=[chat_pb2.ChatMessage(role="user", content="Say something.")],
            **{"max_tokens": 8, "n_samples": N, "sampling": common_pb2.SamplingSettings(seed=5), **fields},
        )
    )  # fmt: skip


async def by_sample(call: Any) -> dict[int, list[chat_pb2.TurnEvent]]:
    found: dict[int, list[chat_pb2.TurnEvent]] = {}
    async with asyncio.timeout(PATIENCE_S):
        async for response in call:
            found.setdefault(response.sample, []).append(response.event)
    return found


async def alone(client: Client, seed: int) -> list[int]:
    return ids_of(await all_of(client.generate(await client.new_session(), seed=seed)))


async def test_sample_i_is_the_answer_with_the_seed_plus_i_wherever_it_is_drawn(cluster: Cluster) -> None:
    for name in "ab":
        await cluster.worker(name)
    client = cluster.client()
    await client.until_nodes(2)
    session = await client.new_session()
    samples = await by_sample(ask(client, session))
    assert sorted(samples) == list(range(N))
    for number, events in samples.items():
        assert [e.sequence for e in events if e.HasField("token")] == list(range(8))
        assert {(e.session_id, e.turn_id) for e in events} == {(sample_session(session, "t", number), "t")}
        assert ids_of(events) == await alone(client, 5 + number)
    assert len({tuple(ids_of(events)) for events in samples.values()}) == N


async def test_each_sample_can_be_gone_on_with_and_they_share_the_history(cluster: Cluster) -> None:
    await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await all_of(client.generate(session, "Before"))
    samples = await by_sample(ask(client, session))
    for number in range(N):
        sample = await client.get(sample_session(session, "t", number))
        assert sample.session.forked_from == ("" if number == 0 else session)
        assert [t.messages[0].content for t in sample.turns] == ["Before", "Say something."]
        assert list(sample.token_ids[-8:]) == ids_of(samples[number])
        assert ids_of(await all_of(client.generate(sample.session.session_id, "And on")))


async def test_samples_are_resumed_each_from_its_own_index_after_a_restart_too(cluster: Cluster) -> None:
    await cluster.worker("a", Script(token_seconds=0.03))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    got: dict[int, list[int]] = {number: [] for number in range(N)}
    call = ask(client, session, max_tokens=16)
    async for response in call:
        if response.event.HasField("token"):
            got[response.sample].append(response.event.token.token_id)
        if sum(map(len, got.values())) == 10:
            break
    call.cancel()
    await cluster.restart()
    client = cluster.client()
    await client.until_nodes(1)
    request = chat_pb2.ResumeRequest(
        session_id=session, turn_id="t", from_indexes=[len(got[number]) for number in range(N)]
    )
    for number, events in (await by_sample(client.stub.Resume(request))).items():
        assert [e.sequence for e in events if e.HasField("token")] == list(range(len(got[number]), 16))
        whole = got[number] + ids_of(events)
        again = await all_of(client.generate(await client.new_session(), seed=5 + number, max_tokens=16))
        assert whole == ids_of(again)


async def test_the_same_request_again_is_the_same_samples_and_begins_what_had_not_begun(cluster: Cluster) -> None:
    await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    first = await by_sample(ask(client, session))
    # as after a crash between two of them
    await client.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id=sample_session(session, "t", 2)))
    again = await by_sample(ask(client, session))
    assert {n: ids_of(events) for n, events in again.items()} == {n: ids_of(events) for n, events in first.items()}
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await by_sample(ask(client, session, n_samples=2))
    assert code_of(error.value) == "turn_exists"


@pytest.fixture
async def left_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Of session "s", whose turn "t" became durable, and nothing after it: nobody runs it, no other sample began."""
    await cluster.worker("a", Script(token_seconds=0.02))
    client = cluster.client()
    await client.until_nodes(1)
    await client.new_session("s")
    real = SqliteRegistry.begin_turn

    async def commits_and_fails(self: SqliteRegistry, turn: object, *more: Any) -> None:
        await real(self, turn, *more)
        raise RegistryUnavailable("the registry failed: disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(SqliteRegistry, "begin_turn", commits_and_fails)
        with pytest.raises(grpc.aio.AioRpcError, match="disk I/O error"):
            await by_sample(ask(client, "s"))
    return client


async def test_whoever_takes_up_a_turn_begins_its_other_samples_too(left_alone: Client) -> None:
    await all_of(left_alone.resume("s", "t"))
    for number in range(N):
        assert len(ids_of(await all_of(left_alone.resume(sample_session("s", "t", number), "t")))) == 8


async def test_samples_that_had_not_begun_can_be_resumed(left_alone: Client) -> None:
    request = chat_pb2.ResumeRequest(session_id="s", turn_id="t", from_indexes=[0] * N)
    samples = await by_sample(left_alone.stub.Resume(request))
    assert [len(ids_of(samples[number])) for number in range(N)] == [8] * N


async def test_samples_that_had_not_begun_can_be_cancelled(left_alone: Client) -> None:
    await left_alone.stub.CancelTurn(chat_pb2.CancelTurnRequest(session_id="s", turn_id="t"))
    assert (await left_alone.status()).n_open_turns == 0


async def test_more_samples_than_were_asked_for_cannot_be_resumed(cluster: Cluster) -> None:
    await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await by_sample(ask(client, session, n_samples=2))
    request = chat_pb2.ResumeRequest(session_id=session, turn_id="t", from_indexes=[0, 0, 0])
    with pytest.raises(grpc.aio.AioRpcError, match="from_indexes has 3 numbers and turn t has 2 answers") as error:
        await by_sample(client.stub.Resume(request))
    assert code_of(error.value) == "invalid_request"


async def test_a_lost_node_moves_its_samples_and_no_other(cluster: Cluster) -> None:
    workers = {name: await cluster.worker(name, Script(token_seconds=0.02)) for name in "ab"}
    client = cluster.client()
    await client.until_nodes(2)
    session = await client.new_session()
    reading = asyncio.create_task(by_sample(ask(client, session, max_tokens=24)))
    await eventually(lambda: sum(len(w.requests) for w in workers.values()) == N and workers["a"].n_running)
    await asyncio.sleep(0.1)
    n_on_a = len(workers["a"].requests)
    workers["a"].script.break_after = 0
    await workers["a"].stop()
    samples = await reading
    lost = [n for n, events in samples.items() if any(e.HasField("node_lost") for e in events)]
    assert len(lost) == n_on_a
    for number, events in samples.items():
        again = await all_of(client.generate(await client.new_session(), seed=5 + number, max_tokens=24))
        assert ids_of(events) == ids_of(again)


async def test_cancelling_the_first_ends_all_and_one_of_the_others_itself(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.02))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    reading = asyncio.create_task(by_sample(ask(client, session, max_tokens=2_000)))
    await eventually(lambda: worker.n_running == N)
    third = sample_session(session, "t", 3)
    await client.stub.CancelTurn(chat_pb2.CancelTurnRequest(session_id=third, turn_id="t"))
    await eventually(lambda: worker.n_running == N - 1)
    await client.stub.CancelTurn(chat_pb2.CancelTurnRequest(session_id=session, turn_id="t"))
    await eventually(lambda: worker.n_running == 0)
    ends = {events[-1].finished.reason for events in (await reading).values()}
    assert ends == {common_pb2.FINISH_REASON_CANCELLED}
    assert (await client.status()).n_open_turns == 0


async def test_there_is_room_for_all_samples_or_none_begins(new_cluster: Any) -> None:
    cluster = await new_cluster(max_open_turns=N - 1)
    client = cluster.client()
    session = await client.new_session()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await by_sample(ask(client, session))
    assert code_of(error.value) == "queue_full"
    assert (await client.get(session)).turns == []
    assert (await client.status()).n_sessions == 1


async def test_the_sdk_reads_samples_through_a_restart(cluster: Cluster) -> None:
    await cluster.worker("a", Script(token_seconds=0.03))
    client = cluster.client()
    await client.until_nodes(1)
    async with AsyncClient(cluster.address) as sdk:
        session = await sdk.create_session()
        samples = session.samples("Say something.", N, max_tokens=16, seed=5, priority=3, turn_id="t")
        got: dict[int, list[int]] = {number: [] for number in range(N)}
        lost = 0
        async for sampled in samples:
            if isinstance(sampled.event, Token):
                got[sampled.sample].append(sampled.event.token_id)
            lost += isinstance(sampled.event, ConnectionLost)
            if not lost and sum(map(len, got.values())) == 10:
                await cluster.restart()
        assert lost
        again = await session.samples("Say something.", N, max_tokens=16, seed=5, priority=3, turn_id="t").collect()
        assert [list(answer.token_ids) for answer in again] == list(got.values())
        assert [answer.session_id for answer in again] == [sample_session(session.id, "t", n) for n in range(N)]
        short = await session.generate("And on", max_tokens=2_000, timeout_s=0.3).collect()
        assert short.finished.reason is FinishReason.DEADLINE


async def test_too_many_samples_are_refused(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="n_samples is 33: at most 32") as error:
        await by_sample(ask(cluster.client(), await cluster.client().new_session(), n_samples=33))
    assert code_of(error.value) == "invalid_request"


async def test_a_sample_is_run_once_though_open_turns_are_looked_for_while_it_begins(
    new_cluster: Any, monkeypatch: pytest.MonkeyPatch, turns_of_idle_houses: list[Turns]
) -> None:
    cluster: Cluster = await new_cluster()
    worker = await cluster.worker("a", Script(token_seconds=0.02))
    client = cluster.client()
    await client.until_nodes(1)
    await client.new_session("s")
    begin, looking = SqliteRegistry.begin_turn, list[asyncio.Task[int]]()

    async def slow_to_tell(self: SqliteRegistry, turn: TurnRecord, *more: Any) -> int:
        epoch = await begin(self, turn, *more)
        if turn.session_id != "s":
            looking.append(asyncio.create_task(turns_of_idle_houses[0].recover()))
            await asyncio.wait(looking, timeout=0.3)
        return epoch

    monkeypatch.setattr(SqliteRegistry, "begin_turn", slow_to_tell)
    samples = await by_sample(ask(client, "s", n_samples=2))
    assert [len(ids_of(samples[number])) for number in range(2)] == [8, 8]
    await asyncio.gather(*looking)
    asked = [request.session_id for request in worker.requests]
    assert sorted(asked) == sorted(sample_session("s", "t", number) for number in range(2))
