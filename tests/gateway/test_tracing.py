"""One trace of one request, over all processes that had to do with it, and a node that died meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from otlp_collector import Collector, Seen

from kvferry.client import Client
from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.model import DEFAULT_MODEL, ensure_model

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # a cluster of its own, and a node is killed in mid-answer

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"

PROMPT = "A walrus named Zebedee keeps the log of the ferry. " * 40


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ensure_model(DEFAULT_MODEL)
    with Collector() as collector:
        monkeypatch.setenv("KVFERRY_OTLP", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        monkeypatch.setenv("KVFERRY_LOG_FORMAT", "json")
        options = ClusterOptions(
            model=DEFAULT_MODEL, directory=tmp_path, n_nodes=2, kv_memory="256MiB", http_port=0,
        )  # fmt: skip
        with LocalCluster(options) as cluster:
            yield cluster, collector


def ask(cluster: LocalCluster, max_tokens: int, kill_after: int | None = None, **headers: str) -> int:
    """How many pieces came."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens, "stream": True}
    n = 0
    url = f"http://{cluster.http_address}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            n += line.startswith("data: {")
            if n == kill_after:
                session_id = json.loads(line.removeprefix("data: "))["id"] + ".0"
                with Client(cluster.address) as client:
                    turn = client.session(session_id).details().turns[-1]
                cluster.kill_node(turn.placements[-1].node_id)
                kill_after = None
    return n


def test_one_request_is_one_trace_from_the_gateway_to_the_store(traced) -> None:
    cluster, collector = traced
    ask(cluster, 1)  # its prompt's rows are in the store from now on
    collector.wait_for(lambda spans: any(s.name == "save" for s in spans))
    ask(cluster, 48, kill_after=8, traceparent=f"00-{TRACE}-{CALLER}-01")

    def is_whole(spans: list[Seen]) -> bool:
        names = [s.name for s in spans if s.trace_id == TRACE]
        return names.count("place") == 2 and {"POST /v1/chat/completions", "save", "restore"} <= set(names)

    spans = [s for s in collector.wait_for(is_whole) if s.trace_id == TRACE]
    by_id = {s.span_id: s for s in spans}

    def path(span: Seen) -> list[str]:
        above = [] if span.parent_id == CALLER else path(by_id[span.parent_id])
        return [*above, f"{span.service.removeprefix('kvferry-')} {span.name}"]

    (restore,) = [s for s in spans if s.name == "restore"]
    model = by_id[by_id[by_id[restore.parent_id].parent_id].parent_id].attributes["gen_ai.request.model"]
    assert path(restore) == [
        "gateway POST /v1/chat/completions",
        "gateway chat",
        f"coordinator chat {model}",
        "coordinator place",
        "node kvferry.v1.WorkerService/RunTurn",
        "node restore",
    ]
    assert restore.attributes["kvferry.rows"] > 100
    (turn,) = [s for s in spans if s.service == "kvferry-coordinator" and s.name.startswith("chat")]
    assert [name for name, _ in turn.events] == ["failover"]
    assert turn.attributes["gen_ai.operation.name"] == "chat"
    assert 8 < turn.attributes["gen_ai.usage.output_tokens"] <= 48
    assert turn.attributes["gen_ai.usage.input_tokens"] >= turn.attributes["gen_ai.usage.cache_read.input_tokens"] > 100
    assert turn.attributes["gen_ai.response.finish_reasons"] in (["length"], ["end"])
    assert sorted(s.failed for s in spans if s.name == "place") == [False, True]
    assert b"walrus" not in collector.raw
    assert b"Zebedee" not in collector.raw
    check_logs(cluster, turn.attributes["gen_ai.conversation.id"])


def check_logs(cluster: LocalCluster, session_id: str) -> None:
    """The same conversation in the logs of the processes: fields, and no text."""
    logs = {path.stem: path.read_text() for path in (cluster.directory / "logs").iterdir()}
    lines = {name: [json.loads(line) for line in text.splitlines() if line[:1] == "{"] for name, text in logs.items()}
    assert any(line.get("session_id") == session_id and line.get("turn_id") for line in lines["coordinator"])
    assert all(line["node_id"] == name for name in ("node-1", "node-2") for line in lines[name])
    assert not any("walrus" in text for text in logs.values())
