"""OpenAI's Python client, unmodified, against a gateway with real nodes."""

from __future__ import annotations

import json

import openai
import pytest

QUESTION = [{"role": "user", "content": "Name three rivers of Europe and say a word about each."}]


def ask(client, **fields):
    return client.chat.completions.create(
        **({"model": "any", "messages": QUESTION, "max_tokens": 24, "temperature": 0} | fields)
    )


def test_an_answer_comes_whole(client):
    answer = ask(client)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_stream_says_the_same_piece_by_piece(client):
    whole = ask(client).choices[0].message.content
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_repeated_prompt_is_found_in_the_cache_without_any_session_id(client):
    words = "The ferry crosses the wide and quiet river every morning at seven. " * 12
    messages = [{"role": "system", "content": words}, {"role": "user", "content": "When does it leave?"}]
    first = ask(client, messages=messages, max_tokens=4).usage
    again = ask(client, messages=[messages[0], {"role": "user", "content": "What does it cross?"}], max_tokens=4).usage
    assert first.prompt_tokens_details.cached_tokens < 64
    assert again.prompt_tokens_details.cached_tokens > 0.8 * again.prompt_tokens - 32


def test_a_seed_makes_an_answer_repeat_and_samples_differ(client):
    one = ask(client, temperature=0.9, seed=5, n=2)
    again = ask(client, temperature=0.9, seed=5, n=2)
    other = ask(client, temperature=0.9, seed=6)
    texts = [choice.message.content for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] != texts[1]
    assert other.choices[0].message.content == texts[1], "sample i has the seed of the request plus i"


def test_streamed_samples_come_interleaved_and_complete(client):
    whole = [choice.message.content for choice in ask(client, temperature=0.9, seed=5, n=2).choices]
    texts = ["", ""]
    for chunk in ask(client, temperature=0.9, seed=5, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole


def test_a_stop_string_ends_the_answer_before_it(client):
    whole = ask(client).choices[0].message.content
    stop = whole.split()[3]
    answer = ask(client, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    assert stop not in answer.choices[0].message.content


def test_log_probabilities_are_of_each_token(client):
    choice = ask(client, logprobs=True, top_logprobs=3, max_tokens=6).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 6
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs)


def test_a_schema_holds_the_answer(client):
    schema = {
        "type": "object",
        "properties": {"river": {"type": "string", "maxLength": 12}, "length": {"type": "integer"}},
        "required": ["river", "length"],
        "additionalProperties": False,
    }
    answer = ask(
        client,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "river", "schema": schema, "strict": True}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"river", "length"}
    assert isinstance(value["length"], int)


def test_a_tool_that_must_be_called_is_called(client):
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        answer = ask(client, tools=[tool], tool_choice=choice, max_tokens=60).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in {"Oslo", "Rome"}
    deltas = [
        call
        for chunk in ask(client, tools=[tool], tool_choice="required", max_tokens=60, stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert deltas[0].index == 0
    assert json.loads(deltas[0].function.arguments)["city"] in {"Oslo", "Rome"}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert ask(client, messages=history, tools=[tool], tool_choice="none").choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "error", "parameter"),
    [
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, openai.BadRequestError, "messages[0].role"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"logit_bias": {"5": 10}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"colour": "red"}}, openai.BadRequestError, "colour"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
        ({"n": 99}, openai.BadRequestError, "n"),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "response_format"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
            openai.BadRequestError,
            "messages[0].content[0]",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_by_name(client, fields, error, parameter, stream):
    with pytest.raises(error) as caught:
        ask(client, stream=stream, **fields)
    assert caught.value.body["message"]
    assert caught.value.param == parameter


def test_a_prompt_beyond_the_context_has_the_code_programs_look_for(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "river " * 9000}])
    assert caught.value.code == "context_length_exceeded"


def test_models_and_their_limits(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-none")
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model="any", input="x")
