"""Each alert, with figures that must raise it and figures that come close and must not: judged by promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "ansible/roles/monitoring/files/kvferry.rules.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (package prometheus)")

EVERY_SECONDS = 5
DAY = 86_400


@dataclass(frozen=True)
class Case:
    """Series in promtool's notation, a value every five seconds: ``fires`` raises the alert within 20 minutes."""

    series: str
    fires: str
    quiet: str


def up(job: str) -> str:
    return f'up{{job="kvferry-{job}",instance="b1"}}'


BOARD = '{instance="b1"}'
EVER = 240  # values: twenty minutes

CASES = {
    "KvferryCoordinatorDown": Case(up("coordinator"), f"1 0x{EVER}", f"1 0 0 1x{EVER}"),
    "KvferryNodeDown": Case(up("node"), f"1 0x{EVER}", f"0x4 1x{EVER}"),
    "KvferryGatewayDown": Case(up("gateway"), f"0x{EVER}", f"0x4 1x{EVER}"),
    "KvferryRegistryMemberDown": Case(up("etcd"), f"0x{EVER}", f"0x4 1x{EVER}"),
    "KvferryNoNode": Case('kvferry_nodes{instance="c",state="live"}', f"3 0x{EVER}", f"0 0 1x{EVER}"),
    "KvferryNodeNotReady": Case(f"kvferry_node_ready{BOARD}", f"0x{EVER}", f"0x50 1x{EVER}"),
    "KvferryLeaseLost": Case(f"kvferry_lease_remaining_seconds{BOARD}", f"1-5x{EVER}", f"0x{EVER}"),
    "KvferryEngineStalled": Case(f"kvferry_engine_stalled_seconds{BOARD}", f"0+5x{EVER}", f"59x{EVER}"),
    "KvferryTokensLostOrDuplicated": Case('kvferry_tokens_lost_total{instance="c"}', f"0 1x{EVER}", f"0x{EVER}"),
    "KvferryWrongRows": Case(f"kvferry_restored_blocks_wrong_total{BOARD}", f"0 1x{EVER}", f"0x{EVER}"),
    "KvferryVerificationMismatch": Case(
        f"kvferry_snapshots_refused_total{BOARD}", f"4x{EVER - 60} 5x60", f"4x{EVER}"
    ),
    "KvferryStoreDegraded": Case(f"kvferry_store_up{BOARD}", f"1 0x{EVER}", f"0x4 1x{EVER}"),
    "KvferryOtherStore": Case('kvferry_node_other_store{node="b1"}', f"1x{EVER}", f"1x10 0x{EVER}"),
    "KvferrySaveFailing": Case(f"kvferry_snapshots_failed_total{BOARD}", f"0x{EVER - 60} 1x60", f"1x{EVER}"),
    "KvferryDiskBudget": Case(
        'kvferry_saves_skipped_total{instance="b1",reason="%s"}', f"0x{EVER - 60} 1x60", f"0x{EVER - 60} 1x60"
    ),
    "KvferryCertificateExpiry": Case(
        'kvferry_certificate_expiry_timestamp_seconds{instance="b1",file="cert.pem"}',
        f"{6 * DAY}x{EVER}", f"{8 * DAY}x{EVER}",
    ),
    "KvferryThrottled": Case(
        'kvferry_cpu_frequency_limit_ratio{instance="b1",policy="policy4"}', f"0.5x{EVER}", f"0.5x50 1x{EVER}"
    ),
    "KvferryHot": Case('kvferry_temperature_celsius{instance="b1",zone="soc"}', f"86x{EVER}", f"85x{EVER}"),
    "KvferryQueueFull": Case(
        'kvferry_turns_refused_total{instance="b1",code="%s"}', f"0x{EVER - 30} 3x30", f"0x{EVER - 30} 3x30"
    ),
    "KvferryRareEvent": Case(
        'kvferry_events_total{instance="b1",event="watchdog_missed"}', f"0x{EVER - 60} 1x60", f"1x{EVER}"
    ),
}  # fmt: skip

LABELS = {"KvferryDiskBudget": ("no_room", "not_worth_it"), "KvferryQueueFull": ("queue_full", "draining")}
"""Of a metric where only some values of a label are bad: one that is, and one that is not."""

OTHER_WAYS = {
    "KvferryTokensLostOrDuplicated": ('kvferry_tokens_duplicated_total{instance="c"}', f"0 1x{EVER}"),
    "KvferryVerificationMismatch": (f"kvferry_store_files_quarantined_total{BOARD}", f"0x{EVER - 60} 1x60"),
    "KvferryDiskBudget": (f"kvferry_write_budget_left_bytes{BOARD}", f"5 0x{EVER}"),
}
"""An alert with two reasons: the second."""


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_of(alert: str, series: str, values: str, *, fires: bool) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    return {
        "name": f"{alert} {'fires' if fires else 'is quiet'} on {series} {values}",
        "interval": f"{EVERY_SECONDS}s",
        "input_series": [{"series": series, "values": values}],
        "promql_expr_test": [
            {"expr": firing, "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": int(fires)}]}
        ],
    }


def rule_tests() -> list[dict[str, Any]]:
    tests = []
    for alert, case in CASES.items():
        bad, harmless = LABELS.get(alert, ("", ""))
        tests.append(test_of(alert, case.series.replace("%s", bad), case.fires, fires=True))
        tests.append(test_of(alert, case.series.replace("%s", harmless), case.quiet, fires=False))
        if alert in OTHER_WAYS:
            tests.append(test_of(alert, *OTHER_WAYS[alert], fires=True))
    return tests


test_of.__test__ = False  # type: ignore[attr-defined]


def promtool(folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    shutil.copy(RULES, folder / "rules.yml")
    about = {"rule_files": ["rules.yml"], "evaluation_interval": f"{EVERY_SECONDS}s", "tests": tests}
    (folder / "tests.yml").write_text(yaml.safe_dump(about))
    return subprocess.run(
        [PROMTOOL, "test", "rules", "tests.yml"], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


def test_each_alert_has_a_case() -> None:
    assert set(CASES) == set(alerts())


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    done = promtool(tmp_path, rule_tests())
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_would_say_so(tmp_path: Path) -> None:
    assert promtool(tmp_path, [test_of("KvferryHot", "up", f"1x{EVER}", fires=True)]).returncode != 0


@needs_promtool
def test_an_alert_says_what_is_where_in_words(tmp_path: Path) -> None:
    rule = alerts()["KvferryCertificateExpiry"]
    case = CASES["KvferryCertificateExpiry"]
    said = {**rule["annotations"], "summary": "cert.pem of b1 ends in 5d 23h 40m 0s"}
    expected = {
        "exp_labels": {"severity": "warning", "instance": "b1", "file": "cert.pem"}, "exp_annotations": said,
    }  # fmt: skip
    test = {
        "interval": f"{EVERY_SECONDS}s",
        "input_series": [{"series": case.series, "values": case.fires}],
        "alert_rule_test": [{"eval_time": "20m", "alertname": rule["alert"], "exp_alerts": [expected]}],
    }
    done = promtool(tmp_path, [test])
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_explained_to_operators() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    assert re.findall(r"^\| `(Kvferry\w+)`", page, re.MULTILINE) == list(alerts())


def test_alerts_ask_for_documented_metrics_only() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    documented = {*re.findall(r"^\| `(kvferry_\w+)", page, re.MULTILINE)}
    asked = {name for rule in alerts().values() for name in re.findall(r"\bkvferry_\w+", rule["expr"])}
    assert asked <= documented
    assert len(asked) > 15
