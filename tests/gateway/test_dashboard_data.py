"""What the page's pictures are made of: the nodes' last minutes, and drill reports that may be anything."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from typing import Any

import pytest
from browser_kit import write_drill_report

from kvferry.client import NodeInfo, NodeState
from kvferry.gateway.dashboard.drill_reports import MAX_BYTES, list_reports, read_report
from kvferry.gateway.dashboard.history import N_SAMPLES, History


def node(name: str, tokens: int, **changed: Any) -> NodeInfo:
    known: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(NodeInfo)}
    known |= {"state": NodeState.LIVE, "kv_bytes_used": 1, "kv_bytes_budget": 4, "temperature_celsius": None}
    return NodeInfo(**{**known, "node_id": name, "tokens_generated": tokens, **changed})


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000.0

    def __call__(self) -> float:
        return self.ms


def test_a_nodes_rate_is_what_it_drew_between_two_looks():
    clock = Clock()
    history = History(clock)
    for tokens, degrees in ((100, None), (130, 51.0), (0, 52.0)):  # it was started again before the third
        history.add([node("a", tokens, temperature_celsius=degrees)])
        clock.ms += 2000
    assert history.all()["a"] == [
        (1_000_000, 0.0, 0.25, None), (1_002_000, 15.0, 0.25, 51.0), (1_004_000, 0.0, 0.25, 52.0)
    ]  # fmt: skip
    assert history.latest() == {"a": [(1_004_000, 0.0, 0.25, 52.0)]}


def test_many_who_look_are_one_sample_a_second_and_five_minutes_at_most():
    clock = Clock()
    history = History(clock)
    for look in range(10 * N_SAMPLES):
        history.add([node("a", look)])
        clock.ms += 200
    samples = history.all()["a"]
    assert len(samples) == N_SAMPLES
    assert all(later[0] - earlier[0] >= 900 for earlier, later in itertools.pairwise(samples))


def test_a_node_that_left_the_fleet_is_forgotten():
    history = History(Clock())
    history.add([node("a", 1), node("b", 1)])
    history.add([node("b", 1)])
    assert set(history.all()) == {"b"}


def test_reports_are_listed_the_newest_first(tmp_path):
    write_drill_report(tmp_path, "kill-node")
    write_drill_report(tmp_path, "slow-disk", verdict="broken")
    found = list_reports(tmp_path)
    assert [(report["name"], report["verdict"]) for report in found] == [("slow-disk", "broken"), ("kill-node", "held")]
    report = read_report(tmp_path, found[0]["id"])
    assert report is not None
    assert report["timeline"][1]["kind"] == "strike"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}']
)
def test_what_is_no_report_is_left_out(tmp_path, content):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "report.json").write_bytes(content)
    assert list_reports(tmp_path) == []


def test_what_is_no_file_keeps_nobody_waiting(tmp_path):
    for name in ("device", "pipe", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "device" / "report.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe" / "report.json")
    (tmp_path / "folder" / "report.json").mkdir()
    assert list_reports(tmp_path) == []


def test_a_report_larger_than_any_drill_writes_is_not_read(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "report.json").write_text(json.dumps({"name": "x" * MAX_BYTES}))
    assert list_reports(tmp_path) == []


@pytest.mark.parametrize("name", ["../secret", "..", ".", "a/b", "", "a" * 300, "-a"])
def test_a_name_leads_nowhere_else(tmp_path, name):
    folder = tmp_path / "reports"
    write_drill_report(folder)
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "report.json").write_text("{}")
    assert read_report(folder, name) is None


def test_without_a_folder_there_are_no_reports(tmp_path):
    assert list_reports(tmp_path / "nowhere") == []
