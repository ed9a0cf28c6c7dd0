"""A turn whose client is gone goes on for a while, for a client that comes back, and not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from cluster_kit import all_of, eventually, ids_of, take_tokens
from scripted_worker import Script

from kvferry.proto.v1 import common_pb2


async def test_a_turn_that_nobody_reads_ends_with_the_tokens_it_has(new_cluster: Callable[..., Any]) -> None:
    cluster = await new_cluster(unread_limit=0.4)
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, "Hi", turn_id="t", max_tokens=4000)
    first = await take_tokens(events, 5)
    await events.aclose()
    await eventually(lambda: worker.n_running == 0)
    kept = await all_of(client.resume(session, "t"))
    assert kept[-1].finished.reason == common_pb2.FINISH_REASON_CANCELLED
    assert ids_of(kept)[:5] == first
    assert len(ids_of(kept)) < 4000
    assert (await client.get(session)).session.open_turn_id == ""


async def test_a_turn_that_is_read_now_and_then_goes_on(new_cluster: Callable[..., Any]) -> None:
    cluster = await new_cluster(unread_limit=1.5)
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, "Hi", turn_id="t", max_tokens=4000)
    for _ in range(5):
        await take_tokens(events, 1)
        await events.aclose()
        await asyncio.sleep(0.4)  # in all longer than the limit, and each time far from it
        events = client.resume(session, "t")
    worker.script.token_seconds = 0.0
    assert len(ids_of(await all_of(events))) == 4000


async def test_a_turn_that_waits_for_a_node_is_kept_however_long(new_cluster: Callable[..., Any]) -> None:
    cluster = await new_cluster(unread_limit=0.2, no_node_wait=0.1)
    client = cluster.client()
    session = await client.new_session()
    waiting = asyncio.create_task(all_of(client.generate(session, "Hi", turn_id="t", max_tokens=5)))
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.6)
    await cluster.worker("a")
    await client.until_nodes(1)
    assert len(ids_of(await all_of(client.resume(session, "t")))) == 5


async def test_while_the_coordinator_was_stopped_nobody_could_read(new_cluster: Callable[..., Any]) -> None:
    cluster = await new_cluster(unread_limit=2.0)
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, "Hi", turn_id="t", max_tokens=4000)
    await take_tokens(events, 5)
    await events.aclose()
    await asyncio.sleep(0.2)
    time.sleep(2.5)  # noqa: ASYNC251 - as SIGSTOP does: its event loop stands still
    await asyncio.sleep(0.6)  # it looks for unread turns again, and again
    worker.script.token_seconds = 0.0
    kept = await all_of(client.resume(session, "t"))
    assert kept[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert len(ids_of(kept)) == 4000


async def test_after_it_was_stopped_a_turn_that_nobody_reads_still_ends(new_cluster: Callable[..., Any]) -> None:
    cluster = await new_cluster(unread_limit=0.4)
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    events = client.generate(await client.new_session(), "Hi", turn_id="t", max_tokens=4000)
    await take_tokens(events, 5)
    await events.aclose()
    time.sleep(0.5)  # noqa: ASYNC251
    assert worker.n_running == 1
    await eventually(lambda: worker.n_running == 0)
