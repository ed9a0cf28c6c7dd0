"""What an answer has to be, as one grammar over its tokens in llguidance's dialect of Lark.

The grammar covers the whole answer, from its first token to the one before the end token: thinking where the model may
think, then the content or a call. Marks for which the model has tokens are those tokens, and cannot be spelled; in the
thinking the text of its end mark is left out too, so that whoever reads the text sees the same thinking as the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from kvferry.engine.errors import FormatTooComplex, InvalidFormat, InvalidTools
from kvferry.engine.text.answers import CALL, END_OF_CALL, END_OF_THINKING, THINK
from kvferry.engine.text.json_text import read_object
from kvferry.engine.text.messages import Tool
from kvferry.engine.text.schema_keywords import unknown_keywords

FORMAT_CHARS_MAX: Final = 1 << 16  # of a schema or an expression; the largest published API schemas have some 30,000
GRAMMAR_CHARS_MAX: Final = 1 << 20
CHOICES_MAX: Final = 256
CHOICE_CHARS_MAX: Final = 1_024

# JSON as Python's json.dumps writes it. With free white space a small model may write blanks for ever.
_JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_ANYTHING: Final = r"/(.|\n)*/"

Thinking = Literal["no", "may", "has begun"]
"""Whether the answer may begin with thinking, or the prompt ends within it."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON value that the schema, an object written as JSON, describes."""

    schema: str


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the expression matches as a whole, in the syntax of Rust's regex crate; ``\\d`` is 0 to 9."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choices:
    """One of these texts."""

    texts: tuple[str, ...]


AnswerFormat = JsonSchema | Regex | Choices

ANY_OBJECT: Final = JsonSchema('{"type": "object"}')


class Marks(Protocol):
    """What a grammar needs of a TextModel."""

    def literal_id(self, text: str) -> int | None: ...


def answer_grammar(
    marks: Marks,
    *,
    content: AnswerFormat | None,
    tools: Sequence[Tool] = (),
    thinking: Thinking = "no",
) -> str:
    """The grammar of an answer that is ``content``, or one call of one of ``tools``; either may be left out, not both.

    Raises InvalidFormat, InvalidTools, FormatTooComplex for what can be told without compiling.
    """
    rules = [f"start: {_thinking(marks, thinking)}answer"]
    choices = []
    if content is not None:
        choices.append("content")
        rules.append(f"content: {_content(content)}")
    if tools:
        choices.append("call")
        calls = " | ".join(f"call_{i}" for i in range(len(tools)))
        rules.append(f'call: {_mark(marks, CALL)} "\\n" ({calls}) "\\n" {_mark(marks, END_OF_CALL)}')
        rules += [f"call_{i}: {_call(tool)}" for i, tool in enumerate(tools)]
    rules.append(f"answer: {' | '.join(choices)}")
    if thinking != "no":
        rules.append(f"THOUGHT: {_ANYTHING} & ~/(.|\\n)*{END_OF_THINKING.replace('/', chr(92) + '/')}(.|\\n)*/")
        rules.append(r"BLANK: /\n{0,2}/")
    grammar = "\n".join(rules)
    if len(grammar) > GRAMMAR_CHARS_MAX:
        raise FormatTooComplex(
            f"the answer's format and tools make a grammar of {len(grammar)} characters, more than the limit of "
            f"{GRAMMAR_CHARS_MAX}"
        )
    return grammar


def can_think(marks: Marks) -> bool:
    """Whether the model has tokens of its own for thinking: without them a grammar leaves no room for any."""
    return marks.literal_id(THINK) is not None and marks.literal_id(END_OF_THINKING) is not None


def _thinking(marks: Marks, thinking: Thinking) -> str:
    if thinking == "no":
        return ""
    ending = f"THOUGHT {_mark(marks, END_OF_THINKING)} BLANK"
    return f"{ending} " if thinking == "has begun" else f"({_mark(marks, THINK)} {ending})? "


def _mark(marks: Marks, text: str) -> str:
    token_id = marks.literal_id(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _content(content: AnswerFormat) -> str:
    match content:
        case JsonSchema():
            return f"%json {_schema(content.schema)}"
        case Regex():
            return _regex(content.pattern)
        case Choices():
            return _choices(content.texts)


def _schema(text: str, **defaults: Any) -> str:
    """A schema on one line, with ``defaults`` and the style of our JSON unless it names its own."""
    if len(text) > FORMAT_CHARS_MAX:
        raise FormatTooComplex(f"the JSON schema has {len(text)} characters, more than the limit of {FORMAT_CHARS_MAX}")
    try:
        schema = read_object(text)
    except ValueError as error:
        raise InvalidFormat(f"the JSON schema is {error}") from error
    if unknown := unknown_keywords(schema):
        raise InvalidFormat(f"the JSON schema has unknown keywords: {json.dumps(unknown[:8], ensure_ascii=False)}")
    return json.dumps({"x-guidance": _JSON_STYLE, **defaults, **schema}, ensure_ascii=False)


def _regex(pattern: str) -> str:
    if len(pattern) > FORMAT_CHARS_MAX:
        raise FormatTooComplex(
            f"the regular expression has {len(pattern)} characters, more than the limit of {FORMAT_CHARS_MAX}"
        )
    if not pattern:
        raise InvalidFormat("the regular expression is empty, so the answer would be")
    from llguidance import regex_to_lark

    escaped = regex_to_lark(pattern, use_ascii="d")
    return f"/{escaped}/"


def _choices(texts: Sequence[str]) -> str:
    if not 1 <= len(texts) <= CHOICES_MAX:
        raise InvalidFormat(f"there are {len(texts)} choices; give 1 to {CHOICES_MAX}")
    for number, text in enumerate(texts, start=1):
        if not 1 <= len(text) <= CHOICE_CHARS_MAX:
            raise InvalidFormat(f"choice {number} has {len(text)} characters; give 1 to {CHOICE_CHARS_MAX}")
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _call(tool: Tool) -> str:
    """A call as Qwen models write it, which is what ``answers`` reads."""
    try:
        arguments = _schema(tool.parameters or "{}", type="object")
    except InvalidFormat as error:
        raise InvalidTools(f"the tool {tool.name}: {error}") from error
    begin = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'{begin} %json {arguments} "}}"'
