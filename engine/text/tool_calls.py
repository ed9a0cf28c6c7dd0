"""What an answer's text holds beside its content: thinking, and calls of tools, as Qwen models write them.

<think> ... </think>
content
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from kvferry.engine.text.messages import ToolCall

_THINK: Final = "<think>"
_END_OF_THINKING: Final = "</think>"
_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer in parts. ``reasoning`` None when it did not think. ``is_thinking``: it ended before the thinking did.

    ``malformed``: texts between call marks that are no call; they are left out of ``content`` too.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]
    is_thinking: bool


def parse_answer(text: str, *, prompt_opened_thinking: bool = False) -> ParsedAnswer:
    """Take an answer apart. ``prompt_opened_thinking``: the prompt ended with the mark that thinking begins with.

    An answer without marks is all content. Never raises: what a model wrote is never an error.
    """
    reasoning, rest, is_thinking = _split_thinking(text, opened=prompt_opened_thinking)
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for body in _CALL.findall(rest):
        call = _call(body)
        if call is None:
            malformed.append(body)
        else:
            calls.append(call)
    content = _CALL.sub("", rest).strip("\n") if calls or malformed else rest
    return ParsedAnswer(content, reasoning, tuple(calls), tuple(malformed), is_thinking)


def _split_thinking(text: str, *, opened: bool) -> tuple[str | None, str, bool]:
    """Reasoning, what comes after it, and whether it was still going on."""
    stripped = text.lstrip("\n")
    if stripped.startswith(_THINK):
        opened, text = True, stripped.removeprefix(_THINK)
    if not opened:
        return None, text, False
    reasoning, found, rest = text.partition(_END_OF_THINKING)
    return reasoning.strip("\n"), rest.lstrip("\n"), not found


def _call(body: str) -> ToolCall | None:
    """A call out of its JSON; None when it is none. Arguments may be an object, or one written into a string."""
    try:
        value = json.loads(body)
        arguments = value["arguments"] if isinstance(value, dict) and "arguments" in value else {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        name = value["name"] if isinstance(value, dict) else None
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)
