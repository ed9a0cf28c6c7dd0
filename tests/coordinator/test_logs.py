"""What the coordinator logs of a turn: whose it is, as fields, and nothing of what it says."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from cluster_kit import all_of
from scripted_worker import Script

from kvferry.telemetry.logs import JsonFormatter


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.DEBUG)
    yield stream
    root.setLevel(level)
    root.removeHandler(handler)


async def test_lines_about_a_turn_name_it_and_where_it_runs(cluster, written: io.StringIO):
    await cluster.worker("a", Script(break_after=3))
    await cluster.worker("b")
    client = cluster.client()
    await client.until_nodes(2)
    session = await client.new_session()
    events = await all_of(client.generate(session, "The quick brown walrus", max_tokens=8))
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    of_turn = [line for line in lines if line["logger"] == "kvferry.coordinator.turn_runner"]
    assert {(line["session_id"], line["turn_id"]) for line in of_turn} == {(session, events[0].turn_id)}
    assert {(line["node_id"], line["epoch"]) for line in of_turn} == {("a", 1), ("b", 2)}
    assert "walrus" not in written.getvalue()
