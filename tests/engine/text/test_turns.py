"""A conversation grows by appending tokens: what is there is never tokenised again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.errors import InvalidMessage
from kvferry.engine.text.model import ChatMessage, TextModel
from kvferry.engine.text.template import ChatTemplate


def messages_of(prompt: Any) -> list[ChatMessage]:
    return [ChatMessage(**message) for message in prompt["messages"]]


def test_recorded_conversations_are_rendered_as_recorded(smollm2: TextModel, smollm2_golden: Any) -> None:
    for prompt in smollm2_golden["prompts"].values():
        assert smollm2.render(messages_of(prompt), add_generation_prompt=True) == prompt["rendered"]
        assert smollm2.first_turn(messages_of(prompt)) == prompt["input_ids"]


def test_turn_by_turn_gives_the_recorded_prompt(smollm2: TextModel, smollm2_golden: Any) -> None:
    """The recorded conversation of three turns; its answers are ones whose text tokenises to themselves."""
    prompt = smollm2_golden["prompts"]["multi"]
    messages = messages_of(prompt)
    tokens = smollm2.first_turn(messages[:2])
    for i in range(2, len(messages), 2):
        tokens += smollm2.encode(messages[i].content)
        tokens += smollm2.next_turn(messages[: i + 1], tokens[-1], [messages[i + 1]])
    assert tokens == prompt["input_ids"]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(system=st.none() | TEXTS, exchanges=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), last=TEXTS)
@pytest.mark.parametrize("name", ["smollm2", "qwen_tiny"])
def test_turn_by_turn_equals_the_whole(
    name: str, smollm2: TextModel, qwen_tiny: TextModel, system: str | None, exchanges: list[tuple[str, str]], last: str
) -> None:
    """For any texts: special tokens stand between the messages, so each message is tokenised by itself in both ways."""
    model = {"smollm2": smollm2, "qwen_tiny": qwen_tiny}[name]
    history: list[ChatMessage] = [] if system is None else [ChatMessage("system", system)]
    tokens: list[int] = []
    for question, answer in exchanges:
        new = ChatMessage("user", question)
        tokens += model.next_turn(history, tokens[-1], [new]) if tokens else model.first_turn([*history, new])
        # The prompt's last token is the line end before the answer; "\n" and the answer's beginning may be one token.
        tokens = tokens[:-1] + model.encode("\n" + answer)
        history += [new, ChatMessage("assistant", answer)]
    tokens += model.next_turn(history, tokens[-1], [ChatMessage("user", last)])
    whole = model.render([*history, ChatMessage("user", last)], add_generation_prompt=True)
    assert tokens == model.encode(whole)


def test_an_answer_s_own_end_token_is_not_repeated(smollm2: TextModel) -> None:
    history = [ChatMessage("user", "Hello"), ChatMessage("assistant", "Hi")]
    new = [ChatMessage("user", "Bye")]
    (end,) = smollm2.end_token_ids
    cut_short = smollm2.next_turn(history, 17, new)
    assert smollm2.decode(cut_short) == "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    assert [end, *smollm2.next_turn(history, end, new)] == cut_short


def test_several_new_messages_and_an_answer_that_looks_like_the_mark(smollm2: TextModel) -> None:
    history = [ChatMessage("user", "Qanswerq Qanswerqxq"), ChatMessage("assistant", "Qanswerq")]
    new = [ChatMessage("tool", "4"), ChatMessage("user", "Qanswerq")]
    appended = smollm2.decode(smollm2.next_turn(history, 0, new))
    assert appended == (
        "<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>user\nQanswerq<|im_end|>\n<|im_start|>assistant\n"
    )


def test_only_an_answer_can_be_continued(smollm2: TextModel) -> None:
    for history in ([], [ChatMessage("user", "Hello")]):
        with pytest.raises(InvalidMessage, match="does not end with an answer"):
            smollm2.next_turn(history, 2, [ChatMessage("user", "x")])


@pytest.mark.parametrize(
    "source",
    ["{{ messages[-1].content }}", "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"],
    ids=["hidden", "twice"],
)
def test_a_template_that_does_not_show_the_answer_once_is_refused(smollm2: TextModel, source: str) -> None:
    object.__setattr__(changed := TextModel(**vars(smollm2)), "_template", ChatTemplate(source, {}))
    with pytest.raises(InvalidMessage, match="does not show an earlier answer once"):
        changed.next_turn([ChatMessage("assistant", "Hi")], 2, [ChatMessage("user", "x")])


def test_special_tokens_in_a_user_s_text_become_those_tokens(smollm2: TextModel) -> None:
    """As recorded by the oracle: content is not escaped."""
    (end,) = smollm2.end_token_ids
    assert end in smollm2.encode("a<|im_end|>b")
    assert smollm2.first_turn([ChatMessage("user", "a<|im_end|>b")]).count(end) == 3
