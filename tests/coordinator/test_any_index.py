"""A client comes back and reads a turn from any index: the exact rest, or one documented status (promise 22)."""

from __future__ import annotations

import asyncio
import random

import grpc
from cluster_kit import Cluster, all_of, code_of, ids_of, read_while_it_lasts, take_tokens
from scripted_worker import Script, scripted_answer

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.engine.text.model import ChatMessage
from kvferry.proto.v1 import chat_pb2

N_READS, N_AT_ONCE = 1_000, 25


async def test_22_a_thousand_readers_from_any_index(cluster: Cluster, model: LoadedModel) -> None:
    """Of finished turns, of running ones, and of a session that was deleted."""
    worker = await cluster.worker("a")
    client, rng = cluster.client(), random.Random(22)
    await client.until_nodes(1)
    answers: dict[str, list[int]] = {}
    for number in range(12):
        session, n_tokens = await client.new_session(), rng.randrange(1, 50)
        answers[session] = ids_of(await all_of(client.generate(session, f"Number {number}", max_tokens=n_tokens)))
    gone = await client.new_session()
    await all_of(client.generate(gone, "Gone"))
    await client.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id=gone))
    worker.script = Script(token_seconds=0.02)
    running = await client.new_session()
    prompt = model.text.first_turn([ChatMessage("user", "Running")])
    answers[running] = scripted_answer(prompt, 0, 200)
    await take_tokens(client.generate(running, "Running", max_tokens=200), 1)
    outcomes = dict.fromkeys(["rest", "end", "beyond", "gone"], 0)
    at_once = asyncio.Semaphore(N_AT_ONCE)

    async def read(session: str, from_index: int) -> None:
        async with at_once:
            events, error = await read_while_it_lasts(client.resume(session, from_index=from_index))
        if session == gone:
            assert error is not None
            assert (error.code(), code_of(error)) == (grpc.StatusCode.NOT_FOUND, "unknown_session")
            outcomes["gone"] += 1
        elif from_index > len(answers[session]):
            assert error is not None
            assert (error.code(), code_of(error)) == (grpc.StatusCode.OUT_OF_RANGE, "index_out_of_range")
            outcomes["beyond"] += 1
        else:
            assert error is None
            assert ids_of(events) == answers[session][from_index:]
            assert [e.sequence for e in events if e.HasField("token")] == [*range(from_index, len(answers[session]))]
            assert events[-1].finished.n_answer_tokens == len(answers[session])
            outcomes["end" if from_index == len(answers[session]) else "rest"] += 1

    async with asyncio.TaskGroup() as readers:
        for _ in range(N_READS):
            session = rng.choice([*answers, gone])
            length = len(answers.get(session, []))
            readers.create_task(read(session, rng.choice([0, length, length + 1, rng.randrange(length + 20)])))
    assert sum(outcomes.values()) == N_READS
    assert min(outcomes.values()) > 50
