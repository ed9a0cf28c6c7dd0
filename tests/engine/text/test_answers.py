"""An answer is taken apart into thinking, content and calls, and never refused."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.engine.text.answers import AnswerPart, AnswerReader, ContentText, ParsedAnswer, ReasoningText, parse_answer
from kvferry.engine.text.messages import ToolCall

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
ADD = ToolCall("add", {"a": 1, "b": [2]})


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("Hello", "Hello", None, ()),
        ("", "", None, ()),
        ("  kept as it is\n", "  kept as it is\n", None, ()),
        (CALL, "", None, (ADD,)),
        (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", None, (ADD, ADD)),
        (f"<think>\nhm\n</think>\n\n{CALL}", "", "hm", (ADD,)),
        ("<think>\n\n</think>\n\nHello", "Hello", "", ()),
        ("\n<think>a</think>b</think>", "b</think>", "a", ()),
        (f"<think>{CALL}</think>x", "x", CALL, ()),
        ('<tool_call>{"name": "now"}</tool_call>', "", None, (ToolCall("now"),)),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", None, (ToolCall("f", {"x": 1}),)),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', None, ()),
        ("no thinking here </think> at all", "no thinking here </think> at all", None, ()),
    ],
)
def test_parts(text: str, content: str, reasoning: str | None, calls: tuple[ToolCall, ...]) -> None:
    assert parse_answer(text) == ParsedAnswer(content, reasoning, calls, (), is_thinking=False)


def test_thinking_that_the_prompt_began() -> None:
    answer = parse_answer("hm\n</think>\n\nHello", prompt_opened_thinking=True)
    assert (answer.reasoning, answer.content, answer.is_thinking) == ("hm", "Hello", False)


@pytest.mark.parametrize(("text", "opened"), [("<think>\nhm, ", False), ("hm, ", True)])
def test_an_answer_that_ended_while_thinking(text: str, opened: bool) -> None:
    answer = parse_answer(text, prompt_opened_thinking=opened)
    assert (answer.reasoning, answer.content, answer.is_thinking) == ("hm, ", "", True)


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "7", '"x"', "{}", '{"name": 7}', '{"name": ""}', '{"name": "f", "arguments": [1]}',
     '{"name": "f", "arguments": "{"}', '{"name": "f", "arguments": null}', "[" * 100_000, '{"a":' * 100_000,
     '{"name": "f", "arguments": ' + '{"a":' * 65 + "1" + "}" * 66, r'{"name": "f", "arguments": {"a": "\ud83e"}}',
     '{"name": "f", "arguments": {"a": NaN}}'],
)  # fmt: skip
def test_what_is_no_call_is_given_as_it_was_written(body: str) -> None:
    answer = parse_answer(f"Well. <tool_call>{body}</tool_call>\n{CALL}")
    assert answer.malformed == (body,)
    assert answer.tool_calls == (ADD,)
    assert answer.content == "Well. "


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(), c, max_size=3),
)


def test_a_string_that_is_never_closed_hides_no_end():
    for text in ('<tool_call>{"name": "x</tool_call>Well.', '<tool_call>\n{"name": "x\n</tool_call>Well.'):
        answer = parse_answer(text)
        assert (len(answer.malformed), answer.tool_calls, answer.content) == (1, (), "Well.")


@settings(deadline=None, max_examples=60)
@given(
    st.text(min_size=1),
    st.dictionaries(st.text(), JSON, max_size=3),
)
@example("</tool_call>", {'"</tool_call>': ["\\", "</tool_call>\n"]})
def test_any_call_comes_back(name: str, arguments: dict[str, object]) -> None:
    text = json.dumps({"name": name, "arguments": arguments})
    assert parse_answer(f"<tool_call>\n{text}\n</tool_call>").tool_calls == (ToolCall(name, arguments),)


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("<>/think_o lca{}\"':,\n")), st.booleans())
def test_nothing_a_model_writes_is_an_error(text: str, opened: bool) -> None:
    parse_answer(text, prompt_opened_thinking=opened)
    parse_answer(f"<think>{text}<tool_call>{text}</tool_call>", prompt_opened_thinking=opened)


def streamed(pieces: list[str], **settings: bool) -> tuple[ParsedAnswer, list[AnswerPart]]:
    reader = AnswerReader(**settings)
    parts = [part for piece in pieces for part in reader.push(piece)]
    parts += reader.finish()
    return reader.answer, parts


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(ends)]


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", "\n\n", "<", "</", "words", "é"])
).map("".join)


@settings(deadline=None, max_examples=300)
@given(PIECES, st.lists(st.integers(0, 400), max_size=12), st.booleans(), st.booleans(), st.booleans())
def test_however_it_comes_the_parts_are_those_of_the_whole(
    text: str, places: list[int], opened: bool, thinks: bool, calls: bool
) -> None:
    answer, parts = streamed(cut(text, places), prompt_opened_thinking=opened, thinks=thinks, calls=calls)
    assert answer == parse_answer(text, prompt_opened_thinking=opened, thinks=thinks, calls=calls)
    assert "".join(p.text for p in parts if isinstance(p, ReasoningText)) == (answer.reasoning or "")
    assert "".join(p.text for p in parts if isinstance(p, ContentText)) == answer.content
    assert tuple(p for p in parts if isinstance(p, ToolCall)) == answer.tool_calls


def test_parts_come_as_soon_as_nothing_can_turn_them_into_something_else() -> None:
    reader = AnswerReader()
    told = [
        reader.push(piece) for piece in ("<thi", "nk>\n", "Hm", ".\n", "\nSo", "</th", "ink>\n\n", "Well", "\n", CALL)
    ]
    assert told == [
        [], [], [ReasoningText("Hm")], [ReasoningText(".")], [ReasoningText("\n\nSo")], [], [],
        [ContentText("Well")], [], [ADD],
    ]  # fmt: skip
    assert reader.finish() == []


def test_plain_text_is_passed_on_at_once() -> None:
    reader = AnswerReader()
    assert [reader.push(piece) for piece in ("Hello", ", a < b", " and\n", "c")] == [
        [ContentText("Hello")], [ContentText(", a < b")], [ContentText(" and")], [ContentText("\nc")],
    ]  # fmt: skip


def test_marks_that_mean_nothing_are_content() -> None:
    text = f"<think>a</think>{CALL}"
    assert parse_answer(text, thinks=False, calls=False) == ParsedAnswer(text, None, (), (), is_thinking=False)
