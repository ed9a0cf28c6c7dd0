"""An answer is taken apart into thinking, content and calls, and never refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.text.messages import ToolCall
from kvferry.engine.text.tool_calls import ParsedAnswer, parse_answer

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
     '{"name": "f", "arguments": "{"}', '{"name": "f", "arguments": null}', "[" * 100_000, '{"a":' * 100_000],
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


@settings(deadline=None, max_examples=60)
@given(
    st.text(min_size=1).filter(lambda s: "</tool_call>" not in json.dumps(s, ensure_ascii=False)),
    st.dictionaries(st.text(), JSON, max_size=3),
)
def test_any_call_comes_back(name: str, arguments: dict[str, object]) -> None:
    text = json.dumps({"name": name, "arguments": arguments})
    assert parse_answer(f"<tool_call>\n{text}\n</tool_call>").tool_calls == (ToolCall(name, arguments),)


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("<>/think_o lca{}\"':,\n")), st.booleans())
def test_nothing_a_model_writes_is_an_error(text: str, opened: bool) -> None:
    parse_answer(text, prompt_opened_thinking=opened)
    parse_answer(f"<think>{text}<tool_call>{text}</tool_call>", prompt_opened_thinking=opened)
