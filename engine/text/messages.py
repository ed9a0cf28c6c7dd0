"""The messages of a conversation, as a model's chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvferry.engine.errors import InvalidMessage

TOOLS_CHARS_MAX: Final = 1 << 20  # of all tools' descriptions as JSON; a large set takes some 50,000


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model wants called: its name, and its arguments as the JSON object they are."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters``: JSON schema of its arguments as text, empty for none."""

    name: str
    description: str = ""
    parameters: str = ""

    def described(self) -> dict[str, Any]:
        """As templates take it. Raises ValueError when ``parameters`` is no JSON."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters:
            function["parameters"] = json.loads(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; the roles are the template's: usually system, user, assistant and tool.

    ``reasoning``: an answer's thinking, apart from its content. ``images_at``: places in the content, in order, before
    which an image stands; 0 is before the text. ``tool_call_id``: of a tool's message, the call whose result it is.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    images_at: tuple[int, ...] = ()
    tool_call_id: str = ""


def template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as the variables of a template. Raises InvalidMessage for image places outside the content."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.images_at:
        found["content"] = _parts(message)
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _template_call(call: ToolCall) -> dict[str, Any]:
    named = {"id": call.id} if call.id else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Tools as plain JSON values of the template's own; None when there are none. Raises InvalidMessage."""
    try:
        text = json.dumps([dict(tool) for tool in tools], ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"the tools cannot be written as JSON: {error}") from error
    if len(text) > TOOLS_CHARS_MAX:
        raise InvalidMessage(f"the tools take {len(text)} characters, more than the limit of {TOOLS_CHARS_MAX}")
    plain: list[dict[str, Any]] = json.loads(text)
    return plain or None


def _parts(message: ChatMessage) -> list[dict[str, str]]:
    """Content with images, as the parts a template of a model that sees goes through."""
    places = message.images_at
    if list(places) != sorted(places) or places[0] < 0 or places[-1] > len(message.content):
        raise InvalidMessage(f"images at {list(places)} must stand in order within {len(message.content)} characters")
    parts: list[dict[str, str]] = []
    start = 0
    for place in places:
        parts += [*_text_part(message.content[start:place]), {"type": "image"}]
        start = place
    return [*parts, *_text_part(message.content[start:])]


def _text_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []
