"""What the coordinator tells a monitor, of real streams through scripted workers."""

from __future__ import annotations

import asyncio
import urllib.request

import numpy as np
from cluster_kit import Cluster, all_of
from free_ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import Script

from kvferry.coordinator.metrics import CoordinatorMetrics
from kvferry.coordinator.registry import FinishReason, TurnOutcome
from kvferry.coordinator.turn import Turn
from kvferry.proto.v1 import chat_pb2
from kvferry.telemetry.loop_lag import LoopLag


async def scrape(address: str) -> dict[str, float]:
    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
            return response.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_turns_failovers_and_nodes_are_counted(tmp_path, model):
    metrics = f"127.0.0.1:{free_port()}"
    cluster = Cluster(tmp_path / "state", model, metrics=metrics)
    await cluster.start()
    try:
        await cluster.worker("a", Script(break_after=3))
        await cluster.worker("b")
        client = cluster.client()
        await client.until_nodes(2)
        await all_of(client.generate(await client.new_session(), "Hi", max_tokens=12))
        found = await scrape(metrics)
    finally:
        await cluster.close()
    assert found["kvferry_turns_total length"] == 1
    assert found["kvferry_answer_tokens_total"] == 12
    assert found["kvferry_failovers_total"] == 1
    assert found["kvferry_placements_lost_total broken_stream"] == 1
    assert (found["kvferry_placements_total a"], found["kvferry_placements_total b"]) == (1, 1)
    assert found["kvferry_failover_pause_seconds_count"] == 1
    assert found["kvferry_time_to_first_token_seconds_count"] == 1
    assert found["kvferry_sessions"] == 1
    assert found["kvferry_nodes live"] == 2
    assert found["kvferry_placement_reasons_total soonest"] == 1
    assert found["kvferry_placement_reasons_total failover"] == 1
    assert found["kvferry_tokens_lost_total"] == found["kvferry_tokens_duplicated_total"] == 0
    assert found["kvferry_turns_waiting"] == 0
    assert found["kvferry_node_store_up b"] == 1


def answered(indexes: list[int], n_tokens: int) -> Turn:
    """What a turn would look like that showed these of its tokens."""
    turn = Turn.__new__(Turn)
    turn.answer_ids = list(range(n_tokens))
    turn.events = [chat_pb2.TurnEvent(sequence=index, token=chat_pb2.TokenEvent(token_id=index)) for index in indexes]
    turn.placements, turn.n_dropped = [], 0
    turn.outcome = TurnOutcome(
        reason=FinishReason.END, answer_ids=np.arange(n_tokens, dtype=np.int32), answer_text="", n_placements=1
    )
    turn._first_token_s = turn._last_token_s = None
    return turn


async def test_a_token_that_subscribers_missed_or_got_twice_is_counted():
    metrics = CoordinatorMetrics(lambda: None, lambda: 0, LoopLag(lambda: 0.0))
    metrics.turn_finished(answered([0, 1, 1, 3], n_tokens=4))
    found = {s.name: s.value for family in metrics._registry.collect() for s in family.samples}
    assert found["kvferry_tokens_lost_total"] == 1
    assert found["kvferry_tokens_duplicated_total"] == 1
