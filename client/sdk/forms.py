"""Tools, and what an answer has to be or consists of, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called. `id`: unique within its session; a tool's message may name it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The content is a JSON value that the schema describes."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The content is any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """The content matches as a whole, in the syntax of Rust's regex crate."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The content is one of these texts."""

    texts: Sequence[str]


OutputFormat = JsonSchema | JsonObject | Regex | Choices


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer in parts. `reasoning`: None when the model did not think; `is_thinking`: it ended before that did.

    `malformed_calls`: what stands between the marks of a call and is none.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    is_thinking: bool = False


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a turn may ask of its answer.

    `tools` are told with a session's first turn; later turns repeat them or leave them out. `must_call`: the answer is
    one call, of any tool (True) or of the one named. `thinking`: None leaves it to the model's template.
    """

    tools: Sequence[Tool] = ()
    must_call: bool | str = False
    thinking: bool | None = None
    format: OutputFormat | None = None


class FormFields(TypedDict, total=False):
    """The fields of AnswerForm as keyword arguments."""

    tools: Sequence[Tool]
    must_call: bool | str
    thinking: bool | None
    format: OutputFormat | None


FREE = AnswerForm()
