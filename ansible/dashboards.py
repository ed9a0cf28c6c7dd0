#!/usr/bin/env python3
"""Writes the dashboards of role monitoring, as Grafana takes them, from the lists below.

python3 dashboards.py            write roles/monitoring/files/dashboards/*.json
python3 dashboards.py --check    exit with 1 when they are not what the lists say
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "roles/monitoring/files/dashboards"
WIDTH = 24
HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """``queries``: PromQL, and the legend of what it gives.

    ``unit``: one of Grafana's. ``kind``: timeseries, or stat for a number now.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    means: str = ""
    below: float | None = None  # red from here down
    above: float | None = None  # red from here up


@dataclass(frozen=True)
class Dashboard:
    """A page."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def rate(counter: str, by: str = "") -> str:
    """A second, of each process, or of all of them by some labels."""
    each = f"rate({counter}[$__rate_interval])"
    return f"sum by ({by}) ({each})" if by else each


def quantiles(histogram: str, by: str = "") -> dict[str, str]:
    """The median and the slowest hundredth."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    buckets = rate(f"{histogram}_bucket", labels)
    return {f"histogram_quantile({q}, {buckets})": f"p{q * 100:g}{legend}" for q in (0.5, 0.99)}


FLEET = Dashboard(
    "kvferry-fleet",
    "kvferry: fleet",
    (
        Panel("Live nodes", {'kvferry_nodes{state="live"}': "{{instance}}"}, kind="stat", width=4, below=1),
        Panel("Coordinators", {'sum(up{job="kvferry-coordinator"})': ""}, kind="stat", width=4, below=1),
        Panel("Open turns", {"sum(kvferry_turns_open)": ""}, kind="stat", width=4),
        Panel("Turns that no node has", {"sum(kvferry_turns_waiting)": ""}, kind="stat", width=4),
        Panel(
            "Lost tokens", {"sum(kvferry_tokens_lost_total)": ""}, kind="stat", width=4, above=1, means="0, or a bug"
        ),
        Panel(
            "Duplicated tokens",
            {"sum(kvferry_tokens_duplicated_total)": ""},
            kind="stat",
            width=4,
            above=1,
            means="0, or a bug",
        ),
        Panel("Who answers", {"up": "{{job}} {{instance}}"}),
        Panel("Running turns", {"kvferry_turns_running": "{{instance}}"}),
        Panel("Queued turns", {"kvferry_turns_queued": "{{instance}}"}),
        Panel("Decode rate", {"kvferry_decode_tokens_per_second": "{{instance}}"}),
        Panel("Prefill rate", {"kvferry_prefill_tokens_per_second": "{{instance}}"}),
        Panel(
            "K/V memory", {"kvferry_kv_cache_bytes_used / kvferry_kv_cache_bytes_budget": "{{instance}}"}, "percentunit"
        ),
        Panel("Temperature", {"kvferry_temperature_celsius": "{{instance}} {{zone}}"}, "celsius", above=85),
        Panel(
            "Clock that is allowed",
            {"kvferry_cpu_frequency_limit_ratio": "{{instance}} {{policy}}"},
            "percentunit",
            means="Below 100 %: throttled",
        ),
        Panel(
            "Event loops: latest wake-up",
            {'kvferry_event_loop_lag_seconds{quantile="0.99"}': "{{job}} {{instance}}"},
            "s",
        ),
        Panel("Silence since the last heartbeat", {"kvferry_node_silence_seconds": "{{node}}"}, "s"),
        Panel("Refused turns", {rate("kvferry_turns_refused_total"): "{{instance}} {{code}}"}, "ops"),
        Panel(
            "Certificates end in",
            {"kvferry_certificate_expiry_timestamp_seconds - time()": "{{instance}} {{file}}"},
            "s",
            below=7 * 86_400,
        ),
        Panel(
            "Builds", {"count by (role, version) (kvferry_build_info)": "{{role}} {{version}}"}, kind="stat", width=12
        ),
        Panel("Rare events", {"increase(kvferry_events_total[1d])": "{{instance}} {{event}}"}, kind="stat", width=12),
    ),
)

TURNS = Dashboard(
    "kvferry-turns",
    "kvferry: sessions and turns",
    (
        Panel("Sessions", {"sum(kvferry_sessions)": ""}, kind="stat", width=6),
        Panel("Streams that gateways send", {"sum(kvferry_gateway_streams_open)": ""}, kind="stat", width=6),
        Panel("Failovers in a day", {"sum(increase(kvferry_failovers_total[1d]))": ""}, kind="stat", width=6),
        Panel(
            "Reuse of prompt tokens in a day",
            {
                '1 - sum(increase(kvferry_prompt_tokens_total{source="computed"}[1d])) / '
                "sum(increase(kvferry_prompt_tokens_total[1d]))": ""
            },
            "percentunit",
            kind="stat",
            width=6,
        ),
        Panel("Time to first token", quantiles("kvferry_time_to_first_token_seconds"), "s"),
        Panel("Time per token", quantiles("kvferry_time_per_token_seconds"), "s"),
        Panel("Pause of turns that moved", quantiles("kvferry_failover_pause_seconds"), "s"),
        Panel("Turns by how they ended", {rate("kvferry_turns_total", "reason"): "{{reason}}"}, "ops"),
        Panel("Answer tokens", {"sum(rate(kvferry_answer_tokens_total[$__rate_interval]))": "tokens"}, "ops"),
        Panel(
            "Where prompt tokens' rows came from", {rate("kvferry_prompt_tokens_total", "source"): "{{source}}"}, "ops"
        ),
        Panel(
            "Placements by what spoke for the node",
            {rate("kvferry_placement_reasons_total", "reason"): "{{reason}}"},
            "ops",
        ),
        Panel("Placements by node", {rate("kvferry_placements_total", "node"): "{{node}}"}, "ops"),
        Panel("Lost placements", {rate("kvferry_placements_lost_total", "cause"): "{{cause}}"}, "ops"),
        Panel("Error of predictions", quantiles("kvferry_prediction_error_ratio"), "percentunit"),
        Panel(
            "Requests to gateways",
            {rate("kvferry_gateway_requests_total", "route, status"): "{{route}} {{status}}"},
            "ops",
        ),
        Panel("First byte of gateways' answers", quantiles("kvferry_gateway_first_byte_seconds", "route"), "s"),
    ),
)

STORE = Dashboard(
    "kvferry-store",
    "kvferry: store",
    (
        Panel("Nodes that can use the store", {"sum(kvferry_store_up)": ""}, kind="stat", width=6, below=1),
        Panel("Snapshots", {"max(kvferry_store_snapshots)": ""}, kind="stat", width=6),
        Panel("Bytes", {"max(kvferry_store_bytes)": ""}, "bytes", kind="stat", width=6),
        Panel(
            "Part of the budget",
            {"max(kvferry_store_bytes) / min(kvferry_store_budget_bytes)": ""},
            "percentunit",
            kind="stat",
            width=6,
            means="Old snapshots leave at 100 %",
        ),
        Panel("Restored", {rate("kvferry_restored_bytes_total"): "{{instance}}"}, "Bps"),
        Panel("Time of a restore", quantiles("kvferry_restore_seconds"), "s"),
        Panel("Rate of the latest restore", {"kvferry_restore_bytes_per_second": "{{instance}}"}, "Bps"),
        Panel("Saved", {rate("kvferry_saved_bytes_total"): "{{instance}}"}, "Bps"),
        Panel("Time of a save", quantiles("kvferry_save_seconds"), "s"),
        Panel("Saves that did not happen", {rate("kvferry_saves_skipped_total"): "{{instance}} {{reason}}"}, "ops"),
        Panel(
            "Snapshots written and failed",
            {
                rate("kvferry_snapshots_published_total"): "{{instance}} written",
                rate("kvferry_snapshots_failed_total"): "{{instance}} failed",
            },
            "ops",
        ),
        Panel(
            "Did not verify",
            {
                "increase(kvferry_snapshots_refused_total[1h])": "{{instance}} refused",
                "increase(kvferry_store_files_quarantined_total[1h])": "{{instance}} quarantined",
            },
        ),
        Panel(
            "Restored blocks computed again",
            {
                "increase(kvferry_restored_blocks_audited_total[1h])": "{{instance}} looked at",
                "kvferry_restored_blocks_wrong_total": "{{instance}} wrong",
            },
        ),
        Panel("Evicted files", {rate("kvferry_store_files_evicted_total"): "{{instance}}"}, "ops"),
        Panel("Prompts whose rows were all there", {rate("kvferry_prompts_covered_total"): "{{instance}}"}, "ops"),
        Panel("May still be written in this hour", {"kvferry_write_budget_left_bytes": "{{instance}}"}, "bytes"),
    ),
)

DASHBOARDS = (FLEET, TURNS, STORE)


def as_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The page as Grafana imports it; who imports it chooses the Prometheus."""
    panels, x, y = [], 0, 0
    for number, panel in enumerate(dashboard.panels, start=1):
        if x + panel.width > WIDTH:
            x, y = 0, y + HEIGHT
        panels.append(_panel(panel, number, {"h": HEIGHT, "w": panel.width, "x": x, "y": y}))
        x += panel.width
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": dashboard.uid, "title": dashboard.title, "tags": ["kvferry"], "schemaVersion": 39, "editable": True,
        "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "templating": {"list": [source]}, "panels": panels,
    }  # fmt: skip


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.below}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.above is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.above}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": query, "legendFormat": legend or "__auto"}
        for i, (query, legend) in enumerate(panel.queries.items())
    ]
    return {
        "id": number, "title": panel.title, "description": panel.means, "type": panel.kind, "gridPos": place,
        "datasource": DATASOURCE, "fieldConfig": {"defaults": defaults, "overrides": []}, "targets": targets,
    }  # fmt: skip


def files() -> dict[Path, str]:
    """What each file has to be."""
    return {
        FOLDER / f"{dashboard.uid}.json": json.dumps(as_grafana(dashboard), indent=1) + "\n" for dashboard in DASHBOARDS
    }


def main(arguments: list[str]) -> int:
    """Write, or check."""
    if arguments == ["--check"]:
        stale = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
        for path in stale:
            sys.stderr.write(f"{path} is not what dashboards.py says; run it\n")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
