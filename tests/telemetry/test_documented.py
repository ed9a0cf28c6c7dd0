"""Names that monitors rely on: each is in docs/metrics.md, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

from kvferry.coordinator import metrics as coordinator_metrics
from kvferry.gateway import metrics as gateway_metrics
from kvferry.node import metrics as node_metrics
from kvferry.node import store_watch
from kvferry.telemetry import host, loop_lag

ROOT = Path(__file__).parents[2]


def names_in_code() -> set[str]:
    fields = (
        *coordinator_metrics.OF_CLUSTER,
        *coordinator_metrics.OF_NODE,
        *node_metrics.OF_LOAD,
        *node_metrics.OF_STORE,
    )
    names = {field.name + ("_total" if field.kind == "counter" else "") for field in fields}
    for module in (coordinator_metrics, node_metrics, store_watch, gateway_metrics, host, loop_lag):
        source = Path(module.__file__).read_text()
        names |= set(re.findall(r"(?:value|labelled)\(\s*\"(\w+)\"", source))
        names |= {f"{name}_total" for name in re.findall(r"labelled_counter\(\s*\"(\w+)\"", source)}
        names |= {f"{name}_info" for name in re.findall(r"info\(\s*\"(\w+)\"", source)}
        names |= {f"{name}_total" for name in re.findall(r"Counter\(\s*f\"{PREFIX}_(\w+)\"", source)}
        names |= set(re.findall(r"(?:Histogram|Gauge)\(\s*f\"{PREFIX}_(\w+)\"", source))
    return {f"kvferry_{name}" for name in names}


def test_the_page_lists_exactly_the_metrics_there_are():
    listed = set(re.findall(r"^\| `(kvferry_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert listed == names_in_code()
