"""Answers that have to be of a form, on a real node over a real socket."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvferry.engine.errors import FormatTooComplex
from kvferry.engine.text.answer_form import Choices, JsonSchema, Regex, answer_grammar
from kvferry.engine.text.model import TextModel
from kvferry.node.errors import InvalidRequest
from kvferry.node.rules import Rules
from kvferry.proto.v1 import common_pb2

from .running_node import RunningNode, error_of

Prompts = dict[str, list[int]]
END = common_pb2.FINISH_REASON_END
WARM = common_pb2.SamplingSettings(temperature=0.9, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=7)
SCHEMA = {
    "type": "object",
    "properties": {
        "river": {"type": "string", "maxLength": 24},
        "km": {"type": "integer", "minimum": 0, "maximum": 9999},
        "deep": {"type": "boolean"},
    },
    "required": ["river", "km", "deep"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def text(smollm2_path: Path) -> TextModel:
    return TextModel.load(smollm2_path)


@pytest.fixture(scope="module")
def grammar(text: TextModel) -> str:
    return answer_grammar(text, content=JsonSchema(json.dumps(SCHEMA)))


def river_of(tokens: list[int], text: TextModel) -> dict[str, object]:
    assert tokens[-1] == 2, "its end token is the model's own"
    value = json.loads(text.decode(tokens[:-1]))
    assert list(value) == ["river", "km", "deep"]
    assert len(value["river"]) <= 24
    assert 0 <= value["km"] <= 9999
    assert isinstance(value["deep"], bool)
    return value


@pytest.mark.parametrize("sampling", [None, WARM], ids=["greedy", "warm"])
def test_an_answer_keeps_its_form_and_goes_on_from_any_token(
    node: RunningNode, prompts: Prompts, session: str, text: TextModel, grammar: str,
    sampling: common_pb2.SamplingSettings | None,
) -> None:  # fmt: skip
    prompt = prompts["chat_en"]
    request = {"session": session, "max_tokens": 80, "sampling": sampling, "grammar": grammar}
    whole = node.run_turn(prompt, **request)
    assert whole.reason == END
    river_of(whole.tokens, text)
    for n_known in (1, len(whole.tokens) // 2, len(whole.tokens) - 1, len(whole.tokens)):
        node.drop(session)
        rest = node.run_turn(prompt + whole.tokens[:n_known], n_prompt_tokens=len(prompt), **request)
        assert rest.tokens == whole.tokens[n_known:]
        assert rest.reason == END


def test_forms_of_a_batch_do_not_mix(node: RunningNode, prompts: Prompts, text: TextModel, grammar: str) -> None:
    prompt = prompts["multi"]
    forms = [grammar, "", answer_grammar(text, content=Choices(("yes", "no"))), grammar]
    samplings = [None, None, WARM, WARM]
    alone = [
        node.run_turn(prompt, session=f"alone{i}", max_tokens=40, grammar=form, sampling=sampling).tokens
        for i, (form, sampling) in enumerate(zip(forms, samplings, strict=True))
    ]
    with ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(node.run_turn, prompt, session=f"beside{i}", max_tokens=40, grammar=form, sampling=sampling)
            for i, (form, sampling) in enumerate(zip(forms, samplings, strict=True))
        ]
        assert [call.result().tokens for call in calls] == alone
    assert text.decode(alone[2][:-1]) in {"yes", "no"}


def test_log_probabilities_are_those_of_the_model_not_of_the_form(
    node: RunningNode, prompts: Prompts, session: str, text: TextModel
) -> None:
    told = common_pb2.SamplingSettings(logprobs=True, top_logprobs=3)
    call = node.start_turn(
        prompts["chat_en"], session=session, sampling=told, grammar=answer_grammar(text, content=Choices(("zebra",)))
    )
    tokens = [token for response in call for token in response.tokens.tokens]
    assert text.decode([token.token_id for token in tokens[:-1]]) == "zebra"
    assert tokens[0].logprob < -3, "nobody asked for a zebra"
    assert tokens[0].top_logprobs[0].logprob > tokens[0].logprob


def test_a_stopped_turn_leaves_a_prefix_that_goes_on(
    node: RunningNode, prompts: Prompts, session: str, text: TextModel, grammar: str
) -> None:
    prompt = prompts["chat_en"]
    whole = node.run_turn(prompt, session=session, max_tokens=80, grammar=grammar).tokens
    cut = node.run_turn(prompt, session=session, max_tokens=5, grammar=grammar)
    assert cut.tokens == whole[:5]
    assert cut.reason == common_pb2.FINISH_REASON_LENGTH
    free = node.run_turn(prompt + cut.tokens, session=session, max_tokens=5)  # the next turn has no form
    assert len(free.tokens) == 5


@pytest.mark.parametrize(
    ("grammar_", "known", "code", "sentence"),
    [
        ("start: nothing_that_is", [], "invalid_format", "cannot be used"),
        ('start: /(a{1000}){1000}/', [5, 5], "format_too_complex", "too complex to follow"),
        ('start: "yes"', [5], "invalid_request", "do not keep its format"),
        ('start: "' + "x" * (1 << 20) + '"', [], "invalid_request", "the grammar has"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(
    node: RunningNode, prompts: Prompts, session: str, grammar_: str, known: list[int], code: str, sentence: str
) -> None:
    prompt = prompts["chat_en"]
    with pytest.raises(grpc.RpcError) as caught:
        node.run_turn(prompt + known, session=session, n_prompt_tokens=len(prompt), grammar=grammar_)
    status, told, details = error_of(caught.value)
    assert (status, told) == ("INVALID_ARGUMENT", code)
    assert sentence in details
    assert "\n" not in details


# --- without a node


async def test_the_next_mask_is_worked_out_before_it_is_asked_for(text: TextModel) -> None:
    rules = Rules(text)
    rule = await rules.rule(answer_grammar(text, content=Choices(("yes", "no"))), [])
    assert rule is not None
    first = rule.mask()
    (yes,) = text.encode("yes")
    assert first[yes >> 5] >> np.uint32(yes & 31) & 1
    rule.accept(yes)
    await asyncio.to_thread(rule.mask)
    assert np.flatnonzero(np.unpackbits(rule.mask().view(np.uint8), bitorder="little")).tolist() == [2]
    rules.close()


async def test_what_becomes_too_complex_is_told_with_the_next_mask(text: TextModel) -> None:
    rules = Rules(text)
    rule = await rules.rule(answer_grammar(text, content=Regex(r"(a{1000}){1000}")), [])
    assert rule is not None
    rule.mask()
    rule.accept(text.encode("a")[0])
    with pytest.raises(FormatTooComplex):
        rule.mask()
    with pytest.raises(InvalidRequest, match="do not keep"):
        await rules.rule(answer_grammar(text, content=Choices(("yes",))), text.encode("no"))
    assert await rules.rule("", [1, 2, 3]) is None
    rules.close()
