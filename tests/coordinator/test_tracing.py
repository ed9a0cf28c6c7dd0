"""A turn's spans, from the client library over the coordinator to its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_worker import Script

from kvferry.client import AsyncClient
from kvferry.telemetry import tracing

pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvferry[tracing]'")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    """All spans of this process, as a program that uses the client library with its own OpenTelemetry gets them."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use_provider(provider)
    yield exporter
    tracing.use_provider(None)


async def test_a_turn_that_moves_is_one_trace_with_a_placement_for_each_node(cluster, exported):
    await cluster.worker("a", Script(break_after=3))
    await cluster.worker("b")
    await cluster.client().until_nodes(2)
    async with AsyncClient(cluster.address) as client:
        session = await client.create_session()
        answer = await session.generate("The walrus keeps the log", max_tokens=8, seed=5).collect()
    await cluster.close()  # what the coordinator still does for the turn is done
    spans = {span.name: span for span in exported.get_finished_spans()}
    placements = [span for span in exported.get_finished_spans() if span.name == "place"]
    asked = spans["chat"]
    (turn,) = [span for name, span in spans.items() if name.startswith("chat ")]
    assert turn.parent.span_id == asked.context.span_id
    assert [span.parent.span_id for span in placements] == [turn.context.span_id] * 2
    assert [(s.attributes["kvferry.node.id"], s.attributes.get("error.type")) for s in placements] == [
        ("a", "broken_stream"), ("b", None),
    ]  # fmt: skip
    for span in (asked, turn):
        assert [event.name for event in span.events] == ["failover"]
        assert span.attributes["gen_ai.conversation.id"] == session.id
        assert span.attributes["gen_ai.request.seed"] == 5
        assert span.attributes["gen_ai.usage.output_tokens"] == len(answer.token_ids) == 8
    assert "walrus" not in "".join(span.to_json() for span in exported.get_finished_spans())


async def test_several_answers_to_one_prompt_are_one_trace(cluster, exported):
    await cluster.worker("a")
    await cluster.client().until_nodes(1)
    async with AsyncClient(cluster.address) as client:
        session = await client.create_session()
        answers = await session.samples("The walrus keeps the log", 2, max_tokens=4).collect()
    await cluster.close()
    (asked,) = [span for span in exported.get_finished_spans() if span.name == "chat"]
    turns = [span for span in exported.get_finished_spans() if span.name.startswith("chat ")]
    assert [turn.parent.span_id for turn in turns] == [asked.context.span_id] * 2
    assert asked.attributes["gen_ai.usage.output_tokens"] == sum(len(answer.token_ids) for answer in answers) == 8
    assert asked.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
