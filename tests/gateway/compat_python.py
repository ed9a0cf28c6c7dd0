"""Each feature with OpenAI's Python client, unmodified. A check asserts that the answer is right."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Name three rivers of Europe and say a word about each."}]

STORY = "Tell a long story of a ferry and its captain."

TOOL = {
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

SCHEMA = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 12}, "length": {"type": "integer"}},
    "required": ["river", "length"],
    "additionalProperties": False,
}


class Case:
    """What a check may use. ``failover()``: kills the node of the next answer, once some of it has come."""

    def __init__(self, client: openai.OpenAI, seeing: openai.OpenAI, picture_url: str, failover: Any) -> None:
        self.client, self.seeing, self.picture_url, self.failover = client, seeing, picture_url, failover

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            **({"model": "any", "messages": QUESTION, "max_tokens": 16, "temperature": 0} | fields)
        )

    def text(self, **fields: Any) -> Any:
        return self.client.completions.create(
            **({"model": "any", "prompt": "The river Rhine", "max_tokens": 8, "temperature": 0} | fields)
        )

    def response(self, **fields: Any) -> Any:
        return self.client.responses.create(
            **({"model": "any", "input": STORY, "max_output_tokens": 16, "temperature": 0} | fields)
        )


def joined(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def check_chat(case: Case) -> None:
    choice = case.chat().choices[0]
    assert choice.message.content
    assert choice.finish_reason == "length"


def check_chat_stream(case: Case) -> None:
    assert joined(case.chat(stream=True)) == case.chat().choices[0].message.content


def check_chat_usage(case: Case) -> None:
    messages = [{"role": "user", "content": "The ferry crosses the wide and quiet river each morning. " * 12}]
    case.chat(messages=messages)
    *_, last = case.chat(messages=messages, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 16
    assert last.usage.prompt_tokens_details.cached_tokens > 0.8 * last.usage.prompt_tokens - 32


def check_chat_n(case: Case) -> None:
    whole = [choice.message.content for choice in case.chat(n=2, temperature=0.9, seed=5).choices]
    assert whole[0] != whole[1]
    texts = ["", ""]
    for chunk in case.chat(n=2, temperature=0.9, seed=5, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole


def check_chat_stop(case: Case) -> None:
    stop = case.chat(max_tokens=openai.NOT_GIVEN, max_completion_tokens=16).choices[0].message.content.split()[2]
    answer = case.chat(stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert stop not in answer.message.content


def check_chat_logprobs(case: Case) -> None:
    choice = case.chat(logprobs=True, top_logprobs=2).choices[0]
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    streamed = [
        one.token
        for chunk in case.chat(logprobs=True, top_logprobs=2, stream=True)
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert streamed == [one.token for one in choice.logprobs.content]


def check_chat_schema(case: Case) -> None:
    class River(BaseModel):
        river: str
        length: int

    wanted = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA, "strict": True}}
    River.model_validate_json(case.chat(response_format=wanted, max_tokens=60).choices[0].message.content)
    parsed = case.client.chat.completions.parse(
        model="any", messages=QUESTION, max_tokens=400, temperature=0, response_format=River, stop=None
    )
    assert isinstance(parsed.choices[0].message.parsed, River)


def check_chat_json(case: Case) -> None:
    text = case.chat(response_format={"type": "json_object"}, max_tokens=40, stop="}").choices[0].message.content
    assert text.startswith("{")


def check_chat_tools(case: Case) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = case.chat(tools=[TOOL], tool_choice=choice, max_tokens=60).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert json.loads(answer.message.tool_calls[0].function.arguments)["city"] in {"Oslo", "Rome"}


def check_chat_tool_stream(case: Case) -> None:
    chunks = case.chat(tools=[TOOL], tool_choice="required", max_tokens=60, stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (calls[0].index, calls[0].function.name) == (0, "weather")
    assert json.loads("".join(call.function.arguments for call in calls))["city"] in {"Oslo", "Rome"}


def check_chat_tool_loop(case: Case) -> None:
    message = case.chat(tools=[TOOL], tool_choice="required", max_tokens=60).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    assert case.chat(messages=[*QUESTION, message, result], tools=[TOOL], tool_choice="none").choices[0].message.content


def check_chat_images(case: Case) -> None:
    def ask(*images: str) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]
        return case.seeing.chat.completions.create(model="any", messages=messages, max_tokens=4, temperature=0)

    assert ask(case.picture_url).usage.prompt_tokens > ask().usage.prompt_tokens + 4


def check_chat_failover(case: Case) -> None:
    fields: Any = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 120}
    whole = case.chat(**fields).choices[0].message.content
    with case.failover():
        assert joined(case.chat(stream=True, **fields)) == whole


def check_text(case: Case) -> None:
    whole = case.text().choices[0].text
    assert whole
    assert "".join(chunk.choices[0].text for chunk in case.text(stream=True)) == whole


def check_text_many(case: Case) -> None:
    answers = case.text(prompt=["One", "Two"], n=2, temperature=0.8, seed=1).choices
    assert [choice.index for choice in answers] == [0, 1, 2, 3]
    assert answers[2].text == case.text(prompt="Two", temperature=0.8, seed=1).choices[0].text
    assert case.text(prompt=[504, 216]).usage.prompt_tokens == 2


def check_text_echo(case: Case) -> None:
    assert case.text(echo=True).choices[0].text == "The river Rhine" + case.text().choices[0].text


def check_text_logprobs(case: Case) -> None:
    choice = case.text(logprobs=2).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [len(others) for others in choice.logprobs.top_logprobs] == [2] * 8


def check_response(case: Case) -> None:
    whole = case.response().output_text
    *events, last = case.response(stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert last.response.output_text == whole


def check_response_previous(case: Case) -> None:
    first = case.response()
    second = case.response(input="And then?", previous_response_id=first.id)
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens


def check_response_background(case: Case) -> None:
    started = case.response(background=True, max_output_tokens=30)
    events = list(case.client.responses.retrieve(started.id, stream=True))
    rest = list(case.client.responses.retrieve(started.id, stream=True, starting_after=5))
    assert [event.sequence_number for event in rest] == [event.sequence_number for event in events[6:]]
    long = case.response(background=True, max_output_tokens=2000)
    assert case.client.responses.cancel(long.id).status == "cancelled"


def check_response_tools(case: Case) -> None:
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    first = case.response(tools=[tool], tool_choice="required", max_output_tokens=60)
    told = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
    assert case.response(input=[told], previous_response_id=first.id).output_text


def check_response_schema(case: Case) -> None:
    wanted = {"format": {"type": "json_schema", "name": "river", "schema": SCHEMA, "strict": True}}
    assert set(json.loads(case.response(text=wanted, max_output_tokens=60).output_text)) == {"river", "length"}


def check_response_forgotten(case: Case) -> None:
    kept = case.response()
    case.client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        case.client.responses.retrieve(kept.id)
    assert case.response(store=False).store is False


def check_response_failover(case: Case) -> None:
    whole = case.response(max_output_tokens=120).output_text
    with case.failover():
        events = list(case.response(max_output_tokens=120, stream=True))
    assert events[-1].response.output_text == whole


def check_models(case: Case) -> None:
    (model,) = case.client.models.list().data
    assert case.client.models.retrieve(model.id) == model


def check_errors(case: Case) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        case.chat(top_p="much")
    assert bad.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        case.client.models.retrieve("none")
    with pytest.raises(openai.BadRequestError) as long:
        case.chat(messages=[{"role": "user", "content": "river " * 9000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        case.chat(user="x" * (49 << 20))
    assert large.value.status_code == 413


def check_no_logit_bias(case: Case) -> None:
    for field in ({"logit_bias": {"5": 1}}, {"presence_penalty": 1}, {"frequency_penalty": 1}):
        refused(case.chat, **field)


def check_no_audio(case: Case) -> None:
    refused(case.chat, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})


def check_no_web(case: Case) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    refused(case.chat, messages=[{"role": "user", "content": [part]}])


def check_no_suffix(case: Case) -> None:
    for field in ({"suffix": "x"}, {"best_of": 2}, {"echo": True, "logprobs": 1}):
        refused(case.text, **field)


def check_no_hosted_tools(case: Case) -> None:
    refused(case.response, tools=[{"type": "web_search"}])
    refused(case.response, truncation="auto")


def check_no_embeddings(case: Case) -> None:
    refused(case.client.embeddings.create, model="any", input="x")


def refused(call: Any, **fields: Any) -> None:
    """A 400 that says why."""
    with pytest.raises(openai.BadRequestError) as caught:
        call(**fields)
    assert caught.value.body["message"]


CHECKS = {name.removeprefix("check_"): check for name, check in dict(globals()).items() if name.startswith("check_")}
