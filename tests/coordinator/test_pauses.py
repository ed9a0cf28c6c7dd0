"""A turn in trouble pauses longer and longer; a node that comes ends the pause, whoever reads."""

from __future__ import annotations

import asyncio

from cluster_kit import all_of, ids_of, until
from scripted_worker import Script

from kvferry.proto.v1 import chat_pb2


async def test_a_node_that_comes_ends_the_pause_of_a_turn_that_nobody_could_take(new_cluster) -> None:
    cluster = await new_cluster(max_placements=1, no_node_wait=1.5)
    worker = await cluster.worker("a", Script(refuse="queue_full"))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    asking = asyncio.ensure_future(all_of(client.generate(session, turn_id="t")))

    async def pauses_for_long() -> bool:
        return len(worker.requests) >= 4  # after 1, 2 and 4 seconds; the next pause is one of eight

    await until(pauses_for_long)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await cluster.worker("b", Script())
    events = await all_of(client.resume(session, "t"))  # would be told no_node after 1.5 s
    assert len(ids_of(events)) == 8
    assert len(worker.requests) == 4


async def test_a_node_that_was_there_all_the_time_does_not(new_cluster) -> None:
    """Its heartbeats go on while it refuses: that is no news."""
    cluster = await new_cluster(max_placements=1)
    worker = await cluster.worker("a", Script(refuse="queue_full"))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    asking = asyncio.ensure_future(all_of(client.generate(session, turn_id="t")))
    await until(lambda: refused_twice(worker))
    n_before = len(worker.requests)
    await asyncio.sleep(1.0)  # ten heartbeats, within the pause of two seconds
    assert len(worker.requests) == n_before
    await asyncio.gather(asking, return_exceptions=True)
    await client.stub.CancelTurn(chat_pb2.CancelTurnRequest(session_id=session))


async def refused_twice(worker: object) -> bool:
    return len(worker.requests) >= 2
