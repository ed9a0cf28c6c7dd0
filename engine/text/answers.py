"""What an answer's text holds beside its content: thinking, and calls of tools, as Qwen models write them.

<think> ... </think>
content
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>

The marks belong to no part, nor do the newlines beside them: those around the thinking, those before a first call, and
those at the end of an answer that calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from kvferry.engine.text.json_text import read_object
from kvferry.engine.text.messages import ToolCall

THINK: Final = "<think>"
END_OF_THINKING: Final = "</think>"
CALL: Final = "<tool_call>"
END_OF_CALL: Final = "</tool_call>"
_STRING: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"')


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


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the content."""

    text: str


AnswerPart = ReasoningText | ContentText | ToolCall


def parse_answer(
    text: str, *, prompt_opened_thinking: bool = False, thinks: bool = True, calls: bool = True
) -> ParsedAnswer:
    """Take a whole answer apart; the settings are those of ``AnswerReader``.

    An answer without marks is all content. Never raises: what a model wrote is never an error.
    """
    reader = AnswerReader(prompt_opened_thinking=prompt_opened_thinking, thinks=thinks, calls=calls)
    reader.push(text)
    reader.finish()
    return reader.answer


class _State(Enum):
    BEFORE = auto()  # nothing but newlines and what may become the mark of thinking
    THINKING = auto()
    AFTER_THINKING = auto()  # nothing but newlines
    CONTENT = auto()
    IN_CALL = auto()


@dataclass(slots=True)
class AnswerReader:
    """Takes an answer apart as it comes. All parts, put together, are ``answer``; however the text is cut into pushes.

    What may still become a mark, and newlines that may stand beside one, are held back. ``prompt_opened_thinking``: the
    prompt ended with the mark that thinking begins with. ``thinks``, ``calls``: whether their marks mean anything. Not
    for several threads at once.
    """

    prompt_opened_thinking: bool = False
    thinks: bool = True
    calls: bool = True
    _state: _State = _State.BEFORE
    _held: str = ""
    _newlines: str = ""  # at the end of the content so far
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _calls: list[ToolCall] = field(default_factory=list)
    _malformed: list[str] = field(default_factory=list)
    _parts: list[AnswerPart] = field(default_factory=list)  # of this push
    _has_thought: bool = False

    @property
    def answer(self) -> ParsedAnswer:
        """The parts so far."""
        return ParsedAnswer(
            content="".join(self._content),
            reasoning="".join(self._reasoning) if self._has_thought else None,
            tool_calls=tuple(self._calls),
            malformed=tuple(self._malformed),
            is_thinking=self._state is _State.THINKING,
        )

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that this text completes."""
        self._held += text
        while self._step():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[AnswerPart]:
        """What was held back, when nothing follows."""
        match self._state:
            case _State.BEFORE if self.prompt_opened_thinking:
                self._begin_thinking(self._held)
                self._add_reasoning(self._held.rstrip("\n"))
            case _State.BEFORE | _State.CONTENT:
                self._add_content(self._held)
            case _State.THINKING:
                self._add_reasoning(self._held.rstrip("\n"))
            case _State.IN_CALL if END_OF_CALL in self._held:  # in a string that was never closed
                body, _, rest = self._held.partition(END_OF_CALL)
                self._malformed.append(body)
                self._add_content(rest)
            case _State.IN_CALL:  # cut in the middle: no call, and shown as it is
                self._add_content(CALL + self._held)
        self._held = ""
        if self._newlines and not (self._calls or self._malformed):
            self._emit_content(self._newlines)
        parts, self._parts = self._parts, []
        return parts

    def _step(self) -> bool:
        """Get one state further; False when more text is needed for that."""
        match self._state:
            case _State.BEFORE:
                return self._leave_beginning()
            case _State.THINKING:
                return self._think()
            case _State.AFTER_THINKING:
                self._held = self._held.lstrip("\n")
                self._state = _State.CONTENT if self._held else _State.AFTER_THINKING
                return bool(self._held)
            case _State.CONTENT:
                return self._read_content()
            case _State.IN_CALL:
                return self._read_call()

    def _leave_beginning(self) -> bool:
        text = self._held.lstrip("\n")
        if self.thinks and THINK.startswith(text) and text != THINK:
            return False
        if self.thinks and text.startswith(THINK):
            self._begin_thinking(text.removeprefix(THINK))
        elif self.prompt_opened_thinking:
            self._begin_thinking(self._held)
        else:
            self._state = _State.CONTENT
        return True

    def _begin_thinking(self, rest: str) -> None:
        self._state, self._held, self._has_thought = _State.THINKING, rest, True

    def _think(self) -> bool:
        text, found, rest = self._held.partition(END_OF_THINKING)
        if found:
            self._add_reasoning(text.rstrip("\n"))
            self._state, self._held = _State.AFTER_THINKING, rest
            return True
        sure = text[: len(text) - _n_begun(text, END_OF_THINKING)].rstrip("\n")
        self._add_reasoning(sure)
        self._held = text[len(sure) :]
        return False

    def _read_content(self) -> bool:
        text, found, rest = self._held.partition(CALL) if self.calls else (self._held, "", "")
        if found:
            self._add_content(text)
            self._state, self._held = _State.IN_CALL, rest
            return True
        n_begun = _n_begun(text, CALL) if self.calls else 0
        self._add_content(text[: len(text) - n_begun])
        self._held = text[len(text) - n_begun :]
        return False

    def _read_call(self) -> bool:
        end = _end_of_call(self._held)
        if end < 0:
            return False
        body, rest = self._held[:end], self._held[end + len(END_OF_CALL) :]
        call = _call(body)
        if call is None:
            self._malformed.append(body)
        else:
            self._calls.append(call)
            self._parts.append(call)
        self._state, self._held = _State.CONTENT, rest
        return True

    def _add_reasoning(self, text: str) -> None:
        if not self._reasoning:
            text = text.lstrip("\n")
        if text:
            self._reasoning.append(text)
            self._parts.append(ReasoningText(text))

    def _add_content(self, text: str) -> None:
        """Newlines at the end wait for what follows: a call, more content, or nothing."""
        text = self._newlines + text
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        if not self._content and (self._calls or self._malformed):
            shown = shown.lstrip("\n")
        self._emit_content(shown)

    def _emit_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._parts.append(ContentText(text))


def _n_begun(text: str, mark: str) -> int:
    """The length of the longest end of the text that is the beginning of the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[len(text) - n :])), 0)


def _end_of_call(text: str) -> int:
    """Where the first mark outside of a string of the JSON is, or -1. No string goes over the end of a line, so one
    that was never closed hides no mark on a later line."""
    end = text.find(END_OF_CALL)
    while end >= 0:
        _, opened, begun = _STRING.sub("", text[:end]).partition('"')
        if not opened or "\n" in begun:
            return end
        end = text.find(END_OF_CALL, end + 1)
    return -1


def _call(body: str) -> ToolCall | None:
    """A call out of its JSON; None when it is none. Arguments may be an object, or one written into a string."""
    try:
        value = read_object(body)
        arguments = value.get("arguments", {})
        if isinstance(arguments, str):
            arguments = read_object(arguments)
    except ValueError:
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)
