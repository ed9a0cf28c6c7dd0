"""An answer that has to be of a form, cut by the death of its node: it goes on elsewhere, the same and valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client.sdk import (
    Client,
    Finished,
    FinishReason,
    JsonSchema,
    Message,
    Placed,
    Regex,
    Sampling,
    Session,
    Token,
    Tool,
    TurnEvent,
)

from .rig import Strike

pytestmark = pytest.mark.alone  # a cluster of three nodes, and what it does within a lease

TRIP = JsonSchema({
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 5, "maxLength": 40},
        "stops": {
            "type": "array", "minItems": 3, "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "minLength": 3, "maxLength": 25},
                    "hours": {"type": "integer", "minimum": 1, "maximum": 12},
                    "by": {"enum": ["ferry", "train", "foot"]},
                },
                "required": ["place", "hours", "by"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "stops"],
    "additionalProperties": False,
})  # fmt: skip
TOOLS = (
    Tool("timetable", "When ferries leave.", {
        "type": "object",
        "properties": {
            "harbour": {"type": "string", "minLength": 3, "maxLength": 30},
            "date": {"type": "string", "format": "date"},
            "passengers": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["harbour", "date", "passengers"],
        "additionalProperties": False,
    }),
    Tool("book", "Books a ferry.", {
        "type": "object",
        "properties": {"ferry": {"type": "string", "pattern": "^F[0-9]{3}$"}, "cabin": {"type": "boolean"}},
        "required": ["ferry", "cabin"],
        "additionalProperties": False,
    }),
)  # fmt: skip
SETTINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=11)]


def held(session: Session, messages: Any, strike: Strike | None = None, **request: Any) -> list[TurnEvent]:
    """One turn, struck or not."""
    events: list[TurnEvent] = []
    with session.generate(messages, max_tokens=300, **request) as turn:
        for event in turn:
            events.append(event)
            if strike is not None:
                strike.hear(event)
    return events


def ids_of(events: list[TurnEvent]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token)]


def end_of(events: list[TurnEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.END
    return events[-1]


def nodes_of(events: list[TurnEvent]) -> set[str]:
    return {event.node_id for event in events if isinstance(event, Placed)}


def check_trip(text: str) -> None:
    trip = json.loads(text)
    assert list(trip) == ["title", "stops"]
    assert 5 <= len(trip["title"]) <= 40
    assert len(trip["stops"]) == 3
    for stop in trip["stops"]:
        assert list(stop) == ["place", "hours", "by"]
        assert 3 <= len(stop["place"]) <= 25
        assert 1 <= stop["hours"] <= 12
        assert stop["by"] in {"ferry", "train", "foot"}


@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "sampled"])
def test_a_json_answer_survives_its_node(nodes, cluster, control, sampling):
    cluster.ensure_all_live()
    question = "Plan a trip along the coast, as JSON."
    with Client(control._cluster.address) as client:
        truth = held(client.create_session(), question, format=TRIP, sampling=sampling)
    n_tokens = len(ids_of(truth))
    assert n_tokens > 40
    with Client(cluster.address) as client:
        for after in (3, n_tokens // 2, n_tokens - 6):
            session = client.create_session()
            events = held(session, question, nodes.strike(after, cluster.kill_node), format=TRIP, sampling=sampling)
            assert ids_of(events) == ids_of(truth)
            assert len(nodes_of(events)) == 2
            text = end_of(events).answer.content
            assert text == end_of(truth).answer.content == "".join(e.content for e in events if isinstance(e, Token))
            check_trip(text)
            cluster.ensure_all_live()


def tool_conversation(
    session: Session, strike: Callable[[int], Strike | None], sampling: Sampling
) -> list[list[TurnEvent]]:
    """Two calls with their results, and a last answer of a form; the first two turns lose their node."""
    first = held(session, "I want to take a ferry.", strike(9), tools=TOOLS, must_call="timetable", sampling=sampling)
    (call,) = end_of(first).answer.tool_calls
    result = Message("tool", '["F101 09:00", "F205 14:30"]', tool_call_id=call.id)
    second = held(session, [result], strike(7), must_call="book", sampling=sampling)
    (booked,) = end_of(second).answer.tool_calls
    done = Message("tool", '{"status": "booked"}', tool_call_id=booked.id)
    third = held(session, [done], format=Regex(r"Your ferry is (booked|full)\. [A-Z][a-z ]{5,40}\."), sampling=sampling)
    return [first, second, third]


@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "sampled"])
def test_a_conversation_with_tools_survives_its_nodes(nodes, cluster, control, sampling):
    cluster.ensure_all_live()
    with Client(control._cluster.address) as client:
        truth = tool_conversation(client.create_session(), lambda _after: None, sampling)

    def strike(after_token: int) -> Strike:
        cluster.ensure_all_live()
        return nodes.strike(after_token, cluster.kill_node)

    with Client(cluster.address) as client:
        session = client.create_session()
        turns = tool_conversation(session, strike, sampling)
        assert [ids_of(turn) for turn in turns] == [ids_of(turn) for turn in truth]
        assert [len(nodes_of(turn)) for turn in turns[:2]] == [2, 2]
        details = session.details()
    timetable = turns[0][-1].answer.tool_calls[0]
    assert timetable.name == "timetable"
    assert list(timetable.arguments) == ["harbour", "date", "passengers"]
    assert 1 <= timetable.arguments["passengers"] <= 9
    book = turns[1][-1].answer.tool_calls[0]
    assert (book.name, book.id) == ("book", f"{details.turns[1].turn_id}.0")
    assert book.arguments["ferry"][0] == "F"
    last = turns[2][-1].answer  # where there are tools, another call is as good as the form
    assert last.tool_calls or last.content.startswith("Your ferry is ")
    assert [turn.parsed for turn in details.turns] == [turn[-1].answer for turn in turns]
    assert details.turns[1].messages == (
        Message("tool", '["F101 09:00", "F205 14:30"]', tool_call_id=f"{details.turns[0].turn_id}.0"),
    )
    cluster.ensure_all_live()
