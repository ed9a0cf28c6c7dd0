"""Every decision is kept with its turn: what each node was predicted to need, why it lost, and what came of it."""

from __future__ import annotations

import asyncio
import json

from click.testing import CliRunner
from cluster_kit import Cluster, all_of
from scripted_worker import Script

from kvferry.client.commands.route import route


async def explained(cluster: Cluster, *arguments: str) -> str:
    """What the command prints, in a thread of its own as it would be in its own process."""
    result = await asyncio.to_thread(
        CliRunner().invoke, route, ["--coordinator", cluster.address, *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


async def test_prediction_and_outcome_are_kept_with_the_turn(cluster: Cluster) -> None:
    for name in "ab":
        await cluster.worker(name, Script(end_after=4))
    client = cluster.client()
    await client.until_nodes(2)
    session = await client.new_session()
    await all_of(client.generate(session, turn_id="t1"))
    placement = (await client.get(session)).turns[0].placements[0]
    assert placement.predicted_seconds > 0
    assert 0 < placement.first_token_seconds < 10
    assert placement.n_candidates == 2
    chosen, other = sorted(placement.candidates, key=lambda c: not c.chosen)
    assert chosen.predicted_seconds == placement.predicted_seconds
    parts = (chosen.queue_seconds, chosen.restore_seconds, chosen.look_seconds, chosen.prefill_seconds)
    assert abs(sum(parts) - chosen.predicted_seconds) < 1e-9
    assert chosen.n_computed == placement.prefix.n_tokens
    assert other.reason == "passed over: as good as a, which comes first by name"
    status = await client.status()
    assert status.n_predictions == 1
    assert status.prediction_error_median > 0
    assert status.first_token_seconds_median > 0


async def test_the_session_goes_where_its_rows_are_and_the_command_says_why(cluster: Cluster) -> None:
    for name in "ab":
        await cluster.worker(name, Script(end_after=4))
    client = cluster.client()
    await client.until_nodes(2)
    session = await client.new_session()
    await all_of(client.generate(session, "A question. " * 20, turn_id="t1"))
    await all_of(client.generate(session, turn_id="t2"))
    second = (await client.get(session)).turns[1].placements[0]
    assert second.node_id == (await client.get(session)).turns[0].placements[0].node_id
    text = await explained(cluster, "--explain", session)
    assert "turn t1" in text
    assert "turn t2" in text
    assert "tokens in memory" in text
    assert "passed over: first token in" in text
    told = json.loads(await explained(cluster, "--explain", session, "--turn", "t2", "--json"))
    assert [turn["turn_id"] for turn in told] == ["t2"]
    assert told[0]["placements"][0]["candidates"][0]["predicted_seconds"] > 0


async def test_a_fork_finds_the_rows_of_its_parent_in_memory(cluster: Cluster) -> None:
    """Another session, the same prefix: the node that has it is known to have it."""
    for name in "abc":
        await cluster.worker(name, Script(end_after=4))
    client = cluster.client()
    await client.until_nodes(3)
    session = await client.new_session()
    await all_of(client.generate(session, "A question. " * 40))
    served = (await client.get(session)).turns[0].placements[0].node_id
    other = await client.new_session()
    await all_of(client.generate(other, "A question. " * 39 + "Another one."))
    placement = (await client.get(other)).turns[0].placements[0]
    chosen = next(c for c in placement.candidates if c.chosen)
    assert placement.node_id == served
    assert chosen.n_resident > 100
