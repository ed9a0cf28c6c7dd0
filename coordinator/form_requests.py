"""What a client may ask of an answer's form: tools, thinking, and what the content has to be. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Final

from kvferry.coordinator.errors import InvalidMessage
from kvferry.engine.errors import InvalidFormat, InvalidTools
from kvferry.engine.text.answer_form import ANY_OBJECT, AnswerFormat, Choices, JsonSchema, Regex
from kvferry.engine.text.json_text import read_object
from kvferry.engine.text.messages import TOOLS_CHARS_MAX, Tool, ToolCall
from kvferry.proto.v1 import chat_pb2

MAX_TOOLS: Final = 128
"""As many as the OpenAI API allows."""
MAX_CALLS: Final = 128
MAX_CALL_ID_CHARACTERS: Final = 256
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FormRequest:
    """The part of a GenerateRequest that is about the answer's form."""

    # Empty: those of the session.
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    # With must_call: this tool; empty: any.
    tool_name: str = ""
    thinking: bool | None = None
    content: AnswerFormat | None = None

    def digest_parts(self) -> tuple[str, ...]:
        """Equal for equal requests; empty for one that says nothing, so that turns begun before keep their digest."""
        if self == NO_FORM:
            return ()
        kind = type(self.content).__name__
        return ("\0form", kind, json.dumps(dataclasses.asdict(self), sort_keys=True))


NO_FORM: Final = FormRequest()


def form_request(request: chat_pb2.GenerateRequest) -> FormRequest:
    """Raises InvalidTools, InvalidFormat."""
    if request.tool_choice not in {chat_pb2.TOOL_CHOICE_UNSPECIFIED, chat_pb2.TOOL_CHOICE_REQUIRED}:
        raise InvalidTools(f"tool_choice is {request.tool_choice}, which this version does not know")
    must_call = request.tool_choice == chat_pb2.TOOL_CHOICE_REQUIRED
    if request.tool_name and not must_call:
        raise InvalidTools(f"tool_name is {request.tool_name[:80]!r}, and tool_choice does not require a call")
    content = checked_format(request.format) if request.HasField("format") else None
    if must_call and content is not None:
        raise InvalidFormat("a call is required, and a format for the content as well: ask for one of them")
    return FormRequest(
        tools=checked_tools(request.tools),
        must_call=must_call,
        tool_name=request.tool_name,
        thinking=request.thinking if request.HasField("thinking") else None,
        content=content,
    )


def checked_tools(tools: Sequence[chat_pb2.Tool]) -> tuple[Tool, ...]:
    """Raises InvalidTools."""
    if len(tools) > MAX_TOOLS:
        raise InvalidTools(f"{len(tools)} tools: at most {MAX_TOOLS} are allowed")
    n_characters = 0
    names: set[str] = set()
    for number, tool in enumerate(tools, start=1):
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidTools(
                f"tool {number} has the name {tool.name[:80]!r}: give 1 to 64 characters of A-Z a-z 0-9 . _ -"
            )
        if tool.name in names:
            raise InvalidTools(f"two tools have the name {tool.name}: give each its own")
        names.add(tool.name)
        n_characters += len(tool.description) + len(tool.parameters)
        if n_characters > TOOLS_CHARS_MAX:
            raise InvalidTools(f"the tools take more than {TOOLS_CHARS_MAX} characters: describe them more briefly")
        if tool.parameters:
            _check_parameters(tool)
    return tuple(Tool(tool.name, tool.description, tool.parameters) for tool in tools)


def _check_parameters(tool: chat_pb2.Tool) -> None:
    """Raises InvalidTools, whether or not the tool has to be called: arguments are an object, by name."""
    try:
        schema = read_object(tool.parameters)
    except ValueError as error:
        raise InvalidTools(f"the parameters of the tool {tool.name} are {error}: give a JSON schema") from error
    if (kind := schema.get("type", "object")) != "object":
        raise InvalidTools(
            f"the parameters of the tool {tool.name} have the type {json.dumps(kind)[:80]}: arguments are an object, "
            'so give {"type": "object", "properties": ...}'
        )


def checked_format(given: chat_pb2.OutputFormat) -> AnswerFormat | None:
    """What the content has to be; what a grammar cannot follow is found when it is compiled. Raises InvalidFormat."""
    match given.WhichOneof("format"):
        case "json_schema":
            return JsonSchema(given.json_schema)
        case "regex":
            return Regex(given.regex)
        case "choices":
            return Choices(tuple(given.choices.texts))
        case "json_object":
            return ANY_OBJECT if given.json_object else None
        case _:
            raise InvalidFormat("the format is empty: give json_schema, regex, choices or json_object")


def checked_calls(number: int, calls: Sequence[chat_pb2.ToolCall]) -> tuple[ToolCall, ...]:
    """Of message ``number``. Raises InvalidMessage."""
    if len(calls) > MAX_CALLS:
        raise InvalidMessage(f"message {number} has {len(calls)} tool calls: at most {MAX_CALLS} are allowed")
    checked = []
    for call in calls:
        try:
            arguments = read_object(call.arguments or "{}")
        except ValueError as error:
            raise InvalidMessage(
                f"message {number} calls {call.name[:80]!r} with arguments that are {error}"
            ) from error
        if not call.name:
            raise InvalidMessage(f"message {number} calls a tool without a name")
        checked.append(ToolCall(call.name, arguments, checked_call_id(number, call.id)))
    return tuple(checked)


def checked_call_id(number: int, call_id: str) -> str:
    """Of message ``number``. Raises InvalidMessage."""
    if len(call_id) > MAX_CALL_ID_CHARACTERS:
        raise InvalidMessage(
            f"message {number} has a call's id of {len(call_id)} characters: give at most {MAX_CALL_ID_CHARACTERS}"
        )
    return call_id
