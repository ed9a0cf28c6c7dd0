"""What the coordinator tells a monitor, of real streams through scripted workers."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

from cluster_kit import Cluster, all_of
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import Script


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


async def scrape(address: str) -> dict[str, float]:
    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
            return response.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_turns_failovers_and_nodes_are_counted(tmp_path, model):
    metrics = free_address()
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
    assert found["kvferry_node_store_up b"] == 1
