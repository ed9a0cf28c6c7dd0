"""Ten times more than the coordinator takes: the rest is told so at once, with when to come back (promise 25)."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import psutil
from cluster_kit import all_of, code_of, ids_of, read_while_it_lasts, retry_after_ms
from scripted_worker import Script


async def test_ten_times_too_many_turns_are_refused_at_once_and_the_others_are_served(new_cluster) -> None:
    cluster = await new_cluster(max_open_turns=8)
    await cluster.worker("a", Script(token_seconds=0.05))
    client = cluster.client()
    await client.until_nodes(1)
    sessions = [await client.new_session() for _ in range(80)]
    order: list[str] = []

    async def ask(session: str) -> str:
        events, error = await read_while_it_lasts(client.generate(session, max_tokens=30))
        if error is None:
            assert len(ids_of(events)) == 30
            order.append("served")
            return "served"
        assert (error.code(), code_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full")
        assert retry_after_ms(error) > 0
        assert events == []
        order.append("refused")
        return "refused"

    before = psutil.Process().memory_info().rss
    outcomes = await asyncio.gather(*map(ask, sessions))
    assert outcomes.count("served") == 8
    assert order[:72] == ["refused"] * 72  # at once: before the first answer was over
    assert psutil.Process().memory_info().rss - before < 50 * 2**20
    # what was refused left nothing behind: the same sessions are served when there is room
    refused = [s for s, outcome in zip(sessions, outcomes, strict=True) if outcome == "refused"]
    assert len(ids_of(await all_of(client.generate(refused[0], max_tokens=3)))) == 3


async def test_two_turns_of_the_limit_asked_for_in_the_same_moment_are_not_both_let_in(new_cluster) -> None:
    cluster = await new_cluster(max_open_turns=1)
    await cluster.worker("a", Script(token_seconds=0.05))
    client = cluster.client()
    await client.until_nodes(1)
    sessions = [await client.new_session() for _ in range(6)]
    found = await asyncio.gather(*(read_while_it_lasts(client.generate(s, max_tokens=20)) for s in sessions))
    assert sum(error is None for _, error in found) == 1
