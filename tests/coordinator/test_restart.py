"""The coordinator goes away in the middle of an answer; whoever comes back gives the same stream."""

from __future__ import annotations

import asyncio
import dataclasses
import signal

import grpc
import grpc.aio
import pytest
from cluster_kit import (
    PATIENCE_S,
    Client,
    Cluster,
    Processes,
    all_of,
    code_of,
    ids_of,
    kinds_of,
    read_while_it_lasts,
    resume_until_served,
    take_tokens,
)
from scripted_worker import Script, scripted_answer

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.engine.text.model import ChatMessage


async def test_an_orderly_stop_sends_readers_away_and_the_turn_is_taken_up_again(
    cluster: Cluster, model: LoadedModel
) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, "Hi", max_tokens=50)
    first = await take_tokens(events, 5)
    stopping = asyncio.create_task(cluster.restart())
    more, error = await read_while_it_lasts(events)
    assert error is not None
    assert (error.code(), code_of(error)) == (grpc.StatusCode.UNAVAILABLE, "draining")
    first += ids_of(more)
    await stopping
    rest = await resume_until_served(client, session, len(first))
    prompt = model.text.first_turn([ChatMessage("user", "Hi")])
    assert first + ids_of(rest) == scripted_answer(prompt, 0, 50)
    again = worker.requests[-1]
    assert list(again.token_ids) == prompt  # from the turn's record alone
    assert (again.epoch, again.coordinator_generation) == (2, worker.requests[0].coordinator_generation + 1)


async def test_finished_turns_and_sessions_are_the_same_after_a_restart(cluster: Cluster) -> None:
    await cluster.worker("a", Script(end_after=6))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    live = [await all_of(client.generate(session, text, turn_id=text, seed=9)) for text in ("one", "two")]
    before = await client.get(session)
    await cluster.restart()
    client = cluster.client()
    after = await client.get(session)
    after.session.last_node_id = before.session.last_node_id  # not remembered, by contract
    assert after == before
    for text, events in zip(("one", "two"), live, strict=True):
        assert await all_of(client.resume(session, text)) == events
        assert await all_of(client.generate(session, text, turn_id=text, seed=9)) == events
    assert kinds_of(await all_of(client.resume(session, "two", from_index=6))) == ["started", "placed", "finished"]


async def test_a_session_of_another_tokenizer_is_kept_and_not_touched(cluster: Cluster, model: LoadedModel) -> None:
    client = cluster.client()
    for name in ("open", "done"):
        await client.new_session(name)
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    await client.until_nodes(1)
    await all_of(client.generate("done", "Hi"))
    await take_tokens(client.generate("open", "Hi", max_tokens=500), 1)
    n_before = len(worker.requests)
    other = LoadedModel(text=dataclasses.replace(model.text, digest="another"), context_length=8192)
    await cluster.restart(other)
    worker.script.token_seconds = 0.0
    client = cluster.client()
    for stream in (client.generate("done", "More"), client.resume("done"), client.resume("open")):
        _, error = await read_while_it_lasts(stream)
        assert error is not None
        assert code_of(error) == "model_mismatch"
    assert len((await client.get("done")).turns) == 1
    assert len(worker.requests) == n_before
    await cluster.restart(model)
    assert len(ids_of(await resume_until_served(cluster.client(), "open", 0))) == 500


@pytest.mark.parametrize("n_before_kill", [0, 13])
async def test_a_coordinator_killed_with_sigkill_gives_the_same_stream_when_it_is_back(
    processes: Processes, model: LoadedModel, n_before_kill: int
) -> None:
    coordinator, address = processes.coordinator()
    for name in "ab":
        processes.worker(name, address, "--token-seconds", "0.02")
    client = Client(address)
    try:
        await client.until_nodes(2)
        session = await client.new_session()
        events = client.generate(session, "Hi", max_tokens=60, seed=2)
        await anext(events)  # started: the record is durable
        first = await take_tokens(events, n_before_kill)
        generation = (await client.status()).generation
        coordinator.send_signal(signal.SIGKILL)
        more, error = await read_while_it_lasts(events)
        assert error is not None
        first += ids_of(more)
        coordinator.wait()
        processes.coordinator(address)
        rest = await resume_until_served(client, session, len(first))
        prompt = model.text.first_turn([ChatMessage("user", "Hi")])
        assert first + ids_of(rest) == scripted_answer(prompt, 2, 60), processes.logs()
        assert rest[-1].finished.n_answer_tokens == 60
        assert (await client.status()).generation == generation + 1
    finally:
        await client.channel.close()


def test_sigterm_ends_the_process_in_order(processes: Processes) -> None:
    coordinator, _ = processes.coordinator()
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(PATIENCE_S) == 0, processes.logs()
