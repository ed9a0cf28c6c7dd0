"""Between the messages about tools and forms and the SDK's values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.client.errors import InvalidFormat, InvalidTools
from kvferry.client.sdk.filling import request_of
from kvferry.client.sdk.forms import (
    AnswerForm,
    Choices,
    JsonObject,
    JsonSchema,
    OutputFormat,
    ParsedAnswer,
    Regex,
    ToolCall,
)
from kvferry.client.sdk.values import RawPrompt
from kvferry.proto.v1 import chat_pb2


def form_to_wire(form: AnswerForm) -> dict[str, Any]:
    """The fields of a GenerateRequest. Raises InvalidTools and InvalidFormat for what is no JSON."""
    fields: dict[str, Any] = {"thinking": form.thinking}
    if form.tools:
        fields["tools"] = [
            request_of(
                chat_pb2.Tool,
                InvalidTools,
                name=tool.name,
                description=tool.description,
                parameters="" if tool.parameters is None else _json(tool.parameters, InvalidTools, tool.name),
            )
            for tool in form.tools
        ]
    if form.must_call is not False:
        fields["tool_choice"] = chat_pb2.TOOL_CHOICE_REQUIRED
        fields["tool_name"] = form.must_call if isinstance(form.must_call, str) else None
    if form.format is not None:
        fields["format"] = _format_to_wire(form.format)
    return fields


def _format_to_wire(form: OutputFormat) -> chat_pb2.OutputFormat:
    match form:
        case JsonSchema():
            schema = _json(form.schema, InvalidFormat, "the schema")
            return request_of(chat_pb2.OutputFormat, InvalidFormat, json_schema=schema)
        case JsonObject():
            return chat_pb2.OutputFormat(json_object=True)
        case Regex():
            return request_of(chat_pb2.OutputFormat, InvalidFormat, regex=form.pattern)
        case Choices():
            return chat_pb2.OutputFormat(choices=request_of(chat_pb2.Choices, InvalidFormat, texts=form.texts))


def _json(value: Mapping[str, Any], refusal: type[InvalidTools | InvalidFormat], what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal(f"{what} cannot be written as JSON: {error}.") from error


def call_to_wire(call: ToolCall) -> chat_pb2.ToolCall:
    """Raises InvalidTools."""
    arguments = _json(call.arguments, InvalidTools, call.name)
    return request_of(chat_pb2.ToolCall, InvalidTools, id=call.id, name=call.name, arguments=arguments)


def call_of(message: chat_pb2.ToolCall) -> ToolCall:
    """A call; the coordinator has seen to it that its arguments are an object."""
    return ToolCall(message.name, json.loads(message.arguments or "{}"), message.id)


def answer_of(message: chat_pb2.ParsedAnswer) -> ParsedAnswer:
    """An answer in parts."""
    return ParsedAnswer(
        content=message.content,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        tool_calls=tuple(call_of(call) for call in message.tool_calls),
        malformed_calls=tuple(message.malformed_calls),
        is_thinking=message.is_thinking,
    )


def parts_of(parts: Iterable[chat_pb2.AnswerPart]) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Content, reasoning and calls of some parts, each put together."""
    parts = list(parts)
    return (
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call_of(part.tool_call) for part in parts if part.HasField("tool_call")),
    )


def raw_prompt_to_wire(raw: RawPrompt) -> chat_pb2.RawPrompt:
    """Raises InvalidRequest."""
    if isinstance(raw.prompt, str):
        return request_of(chat_pb2.RawPrompt, text=raw.prompt)
    return request_of(chat_pb2.RawPrompt, token_ids=raw.prompt)
