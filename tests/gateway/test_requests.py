"""What a request may look like: nulls, and the name of the field that a refusal is about."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kvferry.gateway.chat_request import ChatRequest
from kvferry.gateway.completions import CompletionRequest
from kvferry.gateway.responses_request import ResponseRequest

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAID = {"messages": [{"role": "user", "content": "A river?"}], "max_tokens": 2}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: SAID,
    COMPLETIONS: {"prompt": "A river", "max_tokens": 2},
    RESPONSES: {"input": "A river?", "max_output_tokens": 2},
}
KINDS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponseRequest}
MANY = [5] * 1000
DEEP = '{"a":' * 65 + "1" + "}" * 65


def post(base_url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(base_url + path, json=LEAST[path] | fields, timeout=60)


def refusal(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("path", KINDS)
def test_null_means_that_a_field_is_not_given(base_url, path):
    names = set(KINDS[path].model_fields) - set(LEAST[path])
    answer = post(base_url, path, **dict.fromkeys(names))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": None}}),
        (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": None, "tool_call_id": None}]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": None, "description": None}}]}),
        (CHAT, {"response_format": {"type": "text", "json_schema": None}}),
        (RESPONSES, {"text": {"format": None}}),
        (RESPONSES, {"input": [{"type": None, "role": "user", "content": "x", "id": None, "call_id": None}]}),
    ],
)
def test_null_means_the_same_within_a_field(base_url, path, fields):
    answer = post(base_url, path, **fields)
    assert answer.status_code == 200, answer.text


def test_a_null_in_a_schema_stays_one():
    schema = {"const": None, "default": None}
    asked = ChatRequest.model_validate_json(json.dumps(SAID | {"tools": [tool(schema)]}))
    assert asked.tools[0].function.parameters == schema


@pytest.mark.parametrize(
    ("path", "fields", "parameter"),
    [
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_p": 1e-60}, "top_p"),
        (CHAT, {"min_p": 2}, "min_p"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"stop": ["x"] * 17}, "stop"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"max_tokens": 2**32}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 2**32}, "max_completion_tokens"),
        (CHAT, {"tool_choice": "perhaps"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function"),
        (CHAT, {"tools": [tool({"frob": 1})], "tool_choice": "required"}, "tools"),
        (CHAT, {"tools": [tool({}), tool({})]}, "tools"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"frob": 1}}}}, "response_format"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [{"role": "user", "content": " "}]}, "messages"),
        (COMPLETIONS, {"top_p": 1.5}, "top_p"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": [10**7]}, "prompt"),
        (COMPLETIONS, {"max_tokens": 2**32}, "max_tokens"),
        (RESPONSES, {"max_output_tokens": 2**32}, "max_output_tokens"),
        (RESPONSES, {"input": [{"content": 5}]}, "input[0].content"),
        (RESPONSES, {"input": " "}, "input"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"frob": 1}}}},
            "text.format",
        ),
    ],
)
def test_a_refusal_names_the_requests_own_field(base_url, path, fields, parameter):
    assert refusal(post(base_url, path, **fields))["param"] == parameter


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": MANY}),
        (CHAT, {"messages": [{"role": "user", "content": MANY}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": MANY}]}),
        (CHAT, {"tools": MANY}),
        (CHAT, {"stop": MANY}),
        (COMPLETIONS, {"prompt": [*range(len(MANY)), "x"]}),
        (COMPLETIONS, {"prompt": [[*range(len(MANY)), "x"]] * len(MANY)}),
        (RESPONSES, {"input": MANY}),
        (RESPONSES, {"input": [{"content": MANY}]}),
        (RESPONSES, {"input": [{"output": MANY}]}),
        (RESPONSES, {"include": MANY}),
        (RESPONSES, {"tools": MANY}),
    ],
)
def test_a_thousand_faults_are_not_all_told(path, fields):
    with pytest.raises(ValidationError) as caught:
        KINDS[path].model_validate(LEAST[path] | fields)
    assert caught.value.error_count() < 10


def test_a_body_that_is_no_json_has_no_field_to_name(base_url):
    for body in (b"", b"{", b"[" * 5000, b"\xff"):
        assert refusal(httpx.post(base_url + CHAT, content=body))["param"] is None


@pytest.mark.parametrize("arguments", [DEEP, '{"a":' * 490 + "1" + "}" * 490, '{"a":' * 990 + "1" + "}" * 990])
def test_arguments_that_are_nested_too_deeply_are_refused(base_url, arguments):
    messages = [*SAID["messages"], called(arguments), {"role": "tool", "tool_call_id": "c", "content": "1"}]
    assert "nested" in refusal(post(base_url, CHAT, messages=messages))["message"]
    items = [{"role": "user", "content": "x"}, {"type": "function_call", "name": "f", "arguments": arguments}]
    answer = post(base_url, RESPONSES, input=[*items, {"type": "function_call_output", "output": "1"}])
    assert "nested" in refusal(answer)["message"]


def test_arguments_of_brackets_alone_are_refused(base_url):
    items = [{"type": "function_call", "name": "f", "arguments": "[" * 5000}]
    assert "nested" in refusal(post(base_url, RESPONSES, input=items))["message"]


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": "array"}, json.loads(DEEP)])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_describes_no_object_describes_no_arguments(base_url, parameters, choice):
    told = refusal(post(base_url, CHAT, tools=[tool(parameters)], tool_choice=choice))
    assert (told["param"], "the parameters of the tool f" in told["message"]) == ("tools", True)


def test_an_image_that_is_no_base64_is_refused(base_url):
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}}]
    told = refusal(post(base_url, CHAT, messages=[{"role": "user", "content": content}]))
    assert "not base64" in told["message"]


@pytest.mark.parametrize("after", ["%C2%B2", "5" * 5000, "--1", "-", ""])
def test_what_is_no_number_of_an_event_is_refused(base_url, after):
    answer = httpx.get(f"{base_url}{RESPONSES}/resp_x?stream=true&starting_after={after}")
    assert refusal(answer)["param"] == "starting_after"


def test_a_method_that_a_path_lacks_is_told_those_that_it_has(base_url):
    assert httpx.get(base_url + CHAT).headers["allow"] == "POST"
    answer = httpx.put(base_url + RESPONSES + "/resp_x")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD")
