"""The responses API with OpenAI's Python client."""

from __future__ import annotations

import json
import time

import openai
import pytest

QUESTION = "Tell a story of a ferry and its captain."


def ask(client, **fields):
    return client.responses.create(
        **({"model": "any", "input": QUESTION, "max_output_tokens": 24, "temperature": 0} | fields)
    )


def test_a_response_comes_whole(client):
    response = ask(client)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    assert response.usage.output_tokens == 24


def test_a_stream_says_the_same_in_numbered_events(client):
    whole = ask(client).output_text
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert events[-1].response.output_text == whole


def test_a_conversation_goes_on_from_any_response(client):
    first = ask(client)
    second = ask(client, input="And then?", previous_response_id=first.id)
    branch = ask(client, input="Who was he?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + 24
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens
    assert branch.output_text != second.output_text
    assert ask(client, input="And then?", previous_response_id=first.id).output_text == second.output_text


def test_a_response_is_kept_until_it_is_deleted(client):
    response = ask(client)
    again = client.responses.retrieve(response.id)
    assert again.output_text == response.output_text
    assert again.usage == response.usage
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        ask(client, previous_response_id=response.id)


def test_a_background_response_is_streamed_from_any_event_on(client):
    started = ask(client, background=True, max_output_tokens=40)
    assert started.status in {"queued", "in_progress"}
    events = list(client.responses.retrieve(started.id, stream=True))
    later = list(client.responses.retrieve(started.id, stream=True, starting_after=events[10].sequence_number))
    assert [event.sequence_number for event in later] == [event.sequence_number for event in events[11:]]
    assert later[-1].response.output_text == ask(client, max_output_tokens=40).output_text
    assert client.responses.retrieve(started.id).status == "incomplete"


def test_a_background_response_is_cancelled(client):
    started = ask(client, background=True, max_output_tokens=2000)
    time.sleep(0.2)
    cancelled = client.responses.cancel(started.id)
    assert cancelled.status == "cancelled"
    assert cancelled.usage.output_tokens < 2000


def test_a_tool_is_called_and_its_result_goes_back(client):
    tool = {
        "type": "function",
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    response = ask(client, tools=[tool], tool_choice="required", max_output_tokens=60)
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in {"Oslo", "Rome"}
    told = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert ask(client, input=told, previous_response_id=response.id).output_text


def test_a_schema_holds_the_answer(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema | {"additionalProperties": False}}}
    assert isinstance(json.loads(ask(client, text=text, max_output_tokens=60).output_text)["n"], int)


def test_what_cannot_be_is_refused_by_name(client):
    for fields, parameter in (
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **fields)
        assert caught.value.param == parameter
