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


def test_a_scrape_counts_what_turns_did(tmp_path: Path, smollm2_path: Path, prompts: dict[str, list[int]]) -> None:
    flags = ("--store", str(tmp_path / "store"), "--metrics", "127.0.0.1:0")
    with running_node(tmp_path / "n", smollm2_path, *flags) as node:
        tokens = next(iter(prompts.values()))
        node.run_turn(tokens, max_tokens=8)
        node.wait_for("load.snapshots_published == 1")
        address = json.loads((tmp_path / "n" / "ready.json").read_text())["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
            families = {f.name: f.samples for f in text_string_to_metric_families(response.read().decode())}
    values = {name: samples[0].value for name, samples in families.items() if samples}
    assert values["kvferry_generated_tokens"] == 8
    assert values["kvferry_prefill_tokens"] == len(tokens)
    assert values["kvferry_snapshots_published"] == 1
    assert values["kvferry_node_ready"] == values["kvferry_store_up"] == 1
    assert values["kvferry_restored_blocks_wrong"] == 0
    assert families["kvferry_node_info"][0].labels["node"] == "n"


def test_a_node_that_still_loads_says_so_and_reads_the_boards_temperatures(tmp_path: Path) -> None:
    for number, (kind, degrees) in enumerate((("soc", "61234"), ("broken", "no number"))):
        zone = tmp_path / f"thermal_zone{number}"
        zone.mkdir()
        (zone / "type").write_text(f"{kind}\n")
        (zone / "temp").write_text(degrees)
    state = NodeState(config=NodeConfig(model="m"), started_at=5.0)
    found = {metric.name: metric.samples for metric in NodeMetrics(state, lambda: 8.5, tmp_path).collect()}
    assert found["kvferry_node_ready"][0].value == 0
    assert found["kvferry_node_uptime_seconds"][0].value == 3.5
    assert [(s.labels, s.value) for s in found["kvferry_temperature_celsius"]] == [({"zone": "soc"}, 61.234)]
    assert "kvferry_generated_tokens" not in found
