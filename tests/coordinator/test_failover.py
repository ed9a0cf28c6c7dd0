"""Nodes break in every way; the stream goes on, no token lost, none twice, the same ones as undisturbed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import (
    Client,
    Cluster,
    Processes,
    all_of,
    code_of,
    eventually,
    ids_of,
    kinds_of,
    read_while_it_lasts,
    resume_until_served,
    retry_after_ms,
    take_tokens,
)
from scripted_worker import Script, scripted_answer

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.engine.text.model import ChatMessage
from kvferry.proto.v1 import chat_pb2, common_pb2


def undisturbed(model: LoadedModel, text: str, n_tokens: int, seed: int = 0) -> list[int]:
    """What one worker that nothing happens to answers to a first message."""
    return scripted_answer(model.text.first_turn([ChatMessage("user", text)]), seed, n_tokens)


def causes(events: list[chat_pb2.TurnEvent]) -> list[tuple[str, str]]:
    return [(e.node_lost.node_id, e.node_lost.cause) for e in events if e.HasField("node_lost")]


def served(events: list[chat_pb2.TurnEvent]) -> list[str]:
    return [e.placed.node_id for e in events if e.HasField("placed")]


@pytest.mark.parametrize("break_after", range(1, 12))
async def test_a_stream_that_breaks_at_any_token_goes_on_from_another_node(
    cluster: Cluster, model: LoadedModel, break_after: int
) -> None:
    await cluster.worker("a", Script(break_after=break_after))
    second = await cluster.worker("b")
    client = cluster.client()
    await client.until_nodes(2)
    events = await all_of(client.generate(await client.new_session(), "Hi", max_tokens=12, seed=5))
    assert ids_of(events) == undisturbed(model, "Hi", 12, seed=5)
    assert [e.sequence for e in events if e.HasField("token")] == list(range(12))
    assert (served(events), causes(events)) == (["a", "b"], [("a", "broken_stream")])
    request = second.requests[0]
    assert list(request.token_ids)[request.n_prompt_tokens :] == ids_of(events)[:break_after]
    assert (request.epoch, request.max_tokens) == (2, 12)
    assert events[-1].finished.n_placements == 2


async def test_a_node_killed_with_sigkill_is_left_at_once(
    cluster: Cluster, processes: Processes, model: LoadedModel
) -> None:
    processes.worker("a", cluster.address, "--kill-after", "7")
    client = cluster.client()
    await client.until_nodes(1)
    await cluster.worker("b", Script(token_seconds=0.01))
    await client.until_nodes(2)
    events = await all_of(client.generate(await client.new_session(), "Hi", max_tokens=20))
    assert ids_of(events) == undisturbed(model, "Hi", 20)
    assert (served(events), causes(events)) == (["a", "b"], [("a", "broken_stream")])
    assert (await client.status()).n_failovers == 1


async def test_a_node_frozen_with_sigstop_loses_its_turn_after_the_lease_and_harms_nothing_when_thawed(
    cluster: Cluster, processes: Processes, model: LoadedModel
) -> None:
    frozen = processes.worker("a", cluster.address, "--token-seconds", "0.02")
    client = cluster.client()
    await client.until_nodes(1)
    await cluster.worker("b", Script(token_seconds=0.02))
    await client.until_nodes(2)
    events = client.generate(await client.new_session(), "Hi", max_tokens=150)
    first = await take_tokens(events, 5)
    frozen.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(all_of(events))
    await eventually(lambda: cluster.worker_named("b").requests)
    frozen.send_signal(signal.SIGCONT)
    rest = await reading
    assert first + ids_of(rest) == undisturbed(model, "Hi", 150)
    assert causes(rest) in ([("a", "lease_expired")], [("a", "broken_stream")])  # the lease, or gRPC's own ping
    await client.until_nodes(2)


async def test_a_silent_node_whose_stream_stays_open_loses_its_turn_with_its_lease(
    cluster: Cluster, model: LoadedModel
) -> None:
    hung = await cluster.worker("a", Script())
    await cluster.worker("b")
    client = cluster.client()
    await client.until_nodes(2)
    hung.script.token_seconds = 60.0
    reading = asyncio.create_task(all_of(client.generate(await client.new_session(), "Hi", max_tokens=5)))
    await eventually(lambda: hung.n_running)
    hung.script.mute = True
    events = await reading
    assert ids_of(events) == undisturbed(model, "Hi", 5)
    assert causes(events) == [("a", "lease_expired")]
    await eventually(lambda: hung.n_running == 0)  # its call was cancelled


async def test_a_draining_node_hands_over_between_two_tokens(cluster: Cluster, model: LoadedModel) -> None:
    leaving = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    await cluster.worker("b")
    await client.until_nodes(2)
    events = client.generate(await client.new_session(), "Hi", max_tokens=30)
    first = await take_tokens(events, 4)
    leaving.script.draining = True
    rest = await all_of(events)
    assert first + ids_of(rest) == undisturbed(model, "Hi", 30)
    assert causes(rest) == [("a", "draining")]


async def test_a_restarted_node_takes_its_own_turn_up_when_it_is_the_only_one(
    cluster: Cluster, model: LoadedModel
) -> None:
    first_boot = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    events = client.generate(await client.new_session(), "Hi", max_tokens=30)
    first = await take_tokens(events, 4)
    await first_boot.stop()
    await cluster.worker("a")
    rest = await all_of(events)
    assert first + ids_of(rest) == undisturbed(model, "Hi", 30)
    assert served(rest) == ["a"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Script(repeat=True), None),
        (Script(skip_index=3), "refused"),
        (Script(refuse="queue_full"), "refused"),
        (Script(refuse="out_of_kv_memory"), "refused"),
        (Script(refuse="draining"), "draining"),
        (Script(refuse="lease_lost"), "lease_expired"),
        (Script(refuse="stale_epoch"), "refused"),
        (Script(refuse="internal"), "broken_stream"),
        (Script(refuse="invalid_request"), "refused"),
    ],
    ids=lambda value: value.refuse or "fault" if isinstance(value, Script) else str(value),
)
async def test_a_node_that_misbehaves_or_refuses_costs_no_token(
    cluster: Cluster, model: LoadedModel, fault: Script, cause: str | None
) -> None:
    await cluster.worker("a", fault)
    await cluster.worker("b")
    client = cluster.client()
    await client.until_nodes(2)
    events = await all_of(client.generate(await client.new_session(), "Hi", max_tokens=10))
    assert ids_of(events) == undisturbed(model, "Hi", 10)
    assert causes(events) == ([("a", cause)] if cause else [])


async def test_the_same_node_is_not_asked_twice_in_a_row_while_another_lives(
    cluster: Cluster, model: LoadedModel
) -> None:
    await cluster.worker("a", Script(break_after=1))
    await cluster.worker("b", Script(break_after=1))
    client = cluster.client()
    await client.until_nodes(2)
    events = await all_of(client.generate(await client.new_session(), "Hi", max_tokens=8))
    assert ids_of(events) == undisturbed(model, "Hi", 8)
    assert served(events) == ["a", "b"] * 4


async def test_a_turn_that_breaks_every_node_fails_alone_and_the_session_goes_on(cluster: Cluster) -> None:
    workers = [await cluster.worker(name, Script(refuse="internal")) for name in "abcd"]
    client = cluster.client()
    await client.until_nodes(4)
    session = await client.new_session()
    events = await all_of(client.generate(session, "Poison", turn_id="bad"))
    done = events[-1].finished
    assert (done.reason, done.error_code) == (common_pb2.FINISH_REASON_ERROR, "placements_exhausted")
    assert "the session is intact" in done.error
    assert len(served(events)) == len(set(served(events))) == 3
    assert sum(len(w.requests) for w in workers) == 3
    for worker in workers:
        worker.script.refuse = ""
    again = await all_of(client.resume(session, "bad"))
    assert again[-1].finished == done
    good = await all_of(client.generate(session, "Fine"))
    assert good[0].started.n_history_tokens == 0
    assert good[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
    got = await client.get(session)
    assert (got.session.n_turns, [t.finish_reason for t in got.turns]) == (
        1,
        [common_pb2.FINISH_REASON_ERROR, common_pb2.FINISH_REASON_LENGTH],
    )


# No node.


async def no_node(client: Client, events: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await all_of(events)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert code_of(error.value) == "no_node"
    assert retry_after_ms(error.value) > 0
    return error.value


async def test_with_no_node_the_client_is_told_and_the_turn_runs_when_one_comes(
    cluster: Cluster, model: LoadedModel
) -> None:
    client = cluster.client()
    session = await client.new_session()
    error = await no_node(client, client.generate(session, "Hi", turn_id="t1"))
    assert "no node has registered" in str(error.details())
    got = await client.get(session)
    assert (got.session.open_turn_id, got.turns[0].state) == ("t1", chat_pb2.TURN_STATE_WAITING)
    await no_node(client, client.resume(session, "t1"))
    await cluster.worker("a")
    events = await all_of(client.resume(session, "t1"))
    assert ids_of(events) == undisturbed(model, "Hi", 8)


async def test_a_turn_whose_last_node_is_lost_goes_on_by_itself_when_one_returns(
    cluster: Cluster, model: LoadedModel
) -> None:
    only = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, "Hi", max_tokens=60)
    first = await take_tokens(events, 6)
    await only.stop()
    seen, error = await read_while_it_lasts(events)
    assert error is not None
    assert code_of(error) == "no_node"
    first += ids_of(seen)
    assert causes(seen) == [("a", "broken_stream")]
    await cluster.worker("b")
    rest = await all_of(client.resume(session, from_index=len(first)))
    assert first + ids_of(rest) == undisturbed(model, "Hi", 60)


async def test_a_reader_that_waits_patiently_sees_one_unbroken_stream(
    new_cluster: Callable[..., Any], model: LoadedModel
) -> None:
    cluster = await new_cluster(no_node_wait=20.0)
    only = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    reading = asyncio.create_task(all_of(client.generate(await client.new_session(), "Hi", max_tokens=40)))
    await eventually(lambda: only.n_running)
    await only.stop()
    await asyncio.sleep(0.3)
    await cluster.worker("b")
    assert ids_of(await reading) == undisturbed(model, "Hi", 40)


async def test_the_whole_fleet_dying_and_returning_is_no_poison(cluster: Cluster, model: LoadedModel) -> None:
    workers = [await cluster.worker(name, Script(token_seconds=0.01)) for name in "abcdef"]
    client = cluster.client()
    await client.until_nodes(6)
    session = await client.new_session()
    first = await take_tokens(client.generate(session, "Hi", turn_id="t1", max_tokens=60), 5)
    await asyncio.gather(*(w.stop() for w in workers))
    await asyncio.sleep(0.3)
    await cluster.worker("z")
    events = await all_of(client.resume(session, "t1"))
    assert ids_of(events) == undisturbed(model, "Hi", 60)
    assert ids_of(events)[:5] == first


async def test_a_fleet_that_only_refuses_is_no_node_either(cluster: Cluster, model: LoadedModel) -> None:
    worker = await cluster.worker("a", Script(refuse="stale_coordinator"))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    error = await no_node(client, client.generate(session, "Hi"))
    assert "a: refused, stale_coordinator: scripted to say stale_coordinator" in str(error.details())
    worker.script.refuse = ""
    assert ids_of(await resume_until_served(client, session, 0)) == undisturbed(model, "Hi", 8)


# Fingerprints.


async def test_a_begun_turn_never_goes_on_under_another_fingerprint(cluster: Cluster, model: LoadedModel) -> None:
    first = await cluster.worker("a", Script(token_seconds=0.01), fingerprint="1" * 32)
    other = await cluster.worker("b", fingerprint="2" * 32)
    client = cluster.client()
    await client.until_nodes(2)
    session = await client.new_session()
    begun = await take_tokens(client.generate(session, "Hi", turn_id="t1", max_tokens=40), 4)
    await first.stop()
    error = await no_node(client, client.resume(session, "t1", from_index=40))
    assert "b: cannot take it: the turn began under another fingerprint" in str(error.details())
    await cluster.worker("c", fingerprint="1" * 32)
    events = await all_of(client.resume(session, "t1"))
    assert ids_of(events) == undisturbed(model, "Hi", 40)
    assert ids_of(events)[:4] == begun
    assert other.requests == []


async def test_a_turn_without_a_token_may_begin_anew_under_another_fingerprint(cluster: Cluster) -> None:
    await cluster.worker("a", Script(refuse="draining"), fingerprint="1" * 32)
    await cluster.worker("b", fingerprint="2" * 32)
    client = cluster.client()
    await client.until_nodes(2)
    events = await all_of(client.generate(await client.new_session(), "Hi"))
    assert served(events) == ["a", "b"]
    assert kinds_of(events)[-1] == "finished"
