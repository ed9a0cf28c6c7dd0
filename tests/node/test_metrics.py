"""What a node tells a monitor."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvferry.node.config import NodeConfig
from kvferry.node.metrics import NodeMetrics
from kvferry.node.state import NodeState

from .running_node import running_node


def samples_of(families: dict[str, list], name: str) -> dict[tuple[str, ...], float]:
    return {tuple(s.labels.values()): s.value for samples in families.values() for s in samples if s.name == name}


def test_a_scrape_counts_what_turns_did(tmp_path: Path, smollm2_path: Path, prompts: dict[str, list[int]]) -> None:
    flags = ("--store", str(tmp_path / "store"), "--metrics", "127.0.0.1:0")
    with running_node(tmp_path / "n", smollm2_path, *flags) as node:
        tokens = next(iter(prompts.values()))
        node.run_turn(tokens, max_tokens=8)
        node.wait_for("load.snapshots_published == 1")
        address = json.loads((tmp_path / "n" / "ready.json").read_text())["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
            families = {f.name: f.samples for f in text_string_to_metric_families(response.read().decode())}
    values = {name: samples[0].value for name, samples in families.items() if samples}
    assert values["kvferry_generated_tokens"] == 8
    assert values["kvferry_prefill_tokens"] == len(tokens)
    assert values["kvferry_snapshots_published"] == 1
    assert values["kvferry_node_ready"] == values["kvferry_store_up"] == 1
    assert values["kvferry_restored_blocks_wrong"] == 0
    assert values["kvferry_saved_bytes"] > 0
    assert samples_of(families, "kvferry_save_seconds_count") == {(): 1}
    assert samples_of(families, "kvferry_restore_seconds_count") == {(): 0}
    assert samples_of(families, "kvferry_saves_skipped_total")[("no_room",)] == 0
    assert values["kvferry_store_budget_bytes"] == 16 << 30
    assert families["kvferry_build_info"][0].labels["role"] == "node"
    assert families["kvferry_node_info"][0].labels["node"] == "n"


def test_a_node_that_still_loads_says_so_and_tells_nothing_of_an_engine() -> None:
    state = NodeState(config=NodeConfig(model="m"), started_at=5.0)
    found = {metric.name: metric.samples for metric in NodeMetrics(state, lambda: 8.5).collect()}
    assert found["kvferry_node_ready"][0].value == 0
    assert found["kvferry_node_uptime_seconds"][0].value == 3.5
    assert [(s.labels, s.value) for s in found["kvferry_turns_refused"]] == [({"code": "queue_full"}, 0)]
    assert "kvferry_generated_tokens" not in found
    assert "kvferry_lease_remaining_seconds" not in found


def test_the_lease_that_is_left_goes_below_zero_when_it_has_ended() -> None:
    state = NodeState(config=NodeConfig(model="m"), started_at=5.0)
    state.fence.renew_lease(asked_at=6.0, lease_seconds=3.0)
    found = {metric.name: metric.samples for metric in NodeMetrics(state, lambda: 9.5).collect()}
    assert found["kvferry_lease_remaining_seconds"][0].value == -0.5
