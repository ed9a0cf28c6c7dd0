"""A grammar allows exactly the tokens after which its form can still be met, and the end where it is."""

from __future__ import annotations

import json
import random
import re
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.errors import EngineError, FormatTooComplex, InvalidFormat, InvalidTools
from kvferry.engine.text.answer_form import ANY_OBJECT, Choices, JsonSchema, Regex, answer_grammar, can_think
from kvferry.engine.text.answers import parse_answer
from kvferry.engine.text.grammar import GrammarRule, Grammars
from kvferry.engine.text.messages import Tool
from kvferry.engine.text.model import TextModel

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CLOSED = {"additionalProperties": False}
ADD = Tool("add", "Adds.", json.dumps({"properties": {"x": {"type": "integer"}}, "required": ["x"], **CLOSED}))
CLOCK = Tool("clock.now", "", json.dumps(CLOSED))


@pytest.fixture(scope="module")
def grammars(smollm2: TextModel) -> Grammars:
    return Grammars(smollm2)


@pytest.fixture(scope="module")
def qwen3_grammars(qwen3: TextModel) -> Grammars:
    return Grammars(qwen3)


def allowed(rule: GrammarRule, model: TextModel) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(rule.mask().view(np.uint8), bitorder="little")[: model.vocab_size])


def drawn(rule: GrammarRule, model: TextModel, seed: int) -> list[int]:
    """An answer of random allowed tokens, with its end token."""
    chance = random.Random(seed)
    ids: list[int] = []
    while not ids or ids[-1] not in model.end_token_ids:
        ids.append(int(chance.choice(allowed(rule, model))))
        assert len(ids) < 500
        rule.accept(ids[-1])
    return ids


def content_of(ids: list[int], model: TextModel) -> str:
    return b"".join(map(model.token_bytes, ids[:-1])).decode()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_is_what_the_schema_describes(seed: int, smollm2: TextModel, grammars: Grammars) -> None:
    grammar = answer_grammar(smollm2, content=JsonSchema(json.dumps(PERSON)))
    text = content_of(drawn(grammars.rule(grammar), smollm2, seed), smollm2)
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 12
    assert type(person["age"]) is int
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"a", "b", "ü"}
    assert "\n" not in text


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_drawn_matches_the_expression(seed: int, smollm2: TextModel, grammars: Grammars) -> None:
    pattern = r"(\d{2}|[äöü]+)/\"[a-z]{1,5}\"\n(yes|no)"
    text = content_of(drawn(grammars.rule(answer_grammar(smollm2, content=Regex(pattern))), smollm2, seed), smollm2)
    assert re.fullmatch(pattern, text, re.ASCII)


def test_exactly_the_tokens_that_lead_somewhere_are_allowed(smollm2: TextModel, grammars: Grammars) -> None:
    """Compared with a look at every token of the vocabulary."""
    texts = ("yes", "yesterday", "no\n\"'\\", "né\u2028", "non")
    rule = grammars.rule(answer_grammar(smollm2, content=Choices(texts)))
    so_far = b""
    for token_id in smollm2.encode("yesterday"):
        ends = [text.encode() for text in texts]
        expected = [
            i
            for i in range(smollm2.vocab_size)
            if i not in smollm2.literal_ids
            and smollm2.token_bytes(i)
            and any(end.startswith(so_far + smollm2.token_bytes(i)) for end in ends)
        ]
        is_whole = so_far in ends
        assert rule.accepts == is_whole
        assert allowed(rule, smollm2).tolist() == sorted([*expected, *(smollm2.end_token_ids if is_whole else ())])
        rule.accept(token_id)
        so_far += smollm2.token_bytes(token_id)
    assert allowed(rule, smollm2).tolist() == list(smollm2.end_token_ids), "nothing can follow but the end"


def test_a_rule_made_anew_from_the_tokens_goes_on_the_same(smollm2: TextModel, grammars: Grammars) -> None:
    grammar = answer_grammar(smollm2, content=JsonSchema(json.dumps(PERSON)))
    ids = drawn(grammars.rule(grammar), smollm2, 3)
    first = grammars.rule(grammar)
    elsewhere = Grammars(smollm2)
    for n, token_id in enumerate(ids):
        mask = first.mask().copy()
        assert np.array_equal(mask, elsewhere.rule(grammar, ids[:n]).mask())
        first.accept(token_id)
    elsewhere.rule(grammar, ids)  # its end token too


def test_a_token_that_is_not_allowed_is_an_error(smollm2: TextModel, grammars: Grammars) -> None:
    grammar = answer_grammar(smollm2, content=Choices(("yes",)))
    with pytest.raises(EngineError, match="does not fit the answer's format"):
        grammars.rule(grammar, smollm2.encode("no"))
    with pytest.raises(EngineError, match="does not fit the answer's format"):
        grammars.rule(grammar, smollm2.end_token_ids)


def test_rules_of_one_grammar_do_not_know_of_each_other(smollm2: TextModel, grammars: Grammars) -> None:
    """Drawn in several threads at once."""
    grammar = answer_grammar(smollm2, content=JsonSchema(json.dumps(PERSON)))
    alone = [drawn(grammars.rule(grammar), smollm2, seed) for seed in range(8)]
    together: dict[int, list[int]] = {}

    def draw(seed: int) -> None:
        together[seed] = drawn(grammars.rule(grammar), smollm2, seed)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[seed] for seed in range(8)] == alone


def test_what_is_too_complex_does_not_depend_on_answers_before(smollm2: TextModel, grammars: Grammars) -> None:
    """The limits count what one answer needs, not what all answers of a grammar did."""
    grammar = answer_grammar(smollm2, content=Regex(r"(\w{1,30} ){1,300}"))

    def n_followed(seed: int) -> int:
        chance, rule = random.Random(seed), grammars.rule(grammar)
        for n in range(120):
            try:
                rule.accept(int(chance.choice(allowed(rule, smollm2)[:-1])))
            except FormatTooComplex:
                return n
        return 120

    alone = [n_followed(0), n_followed(1)]
    assert [n_followed(1), n_followed(0)] == alone[::-1]


# --- thinking and calls


@pytest.mark.parametrize("seed", range(10))
def test_a_call_that_is_required_is_one(seed: int, smollm2: TextModel, grammars: Grammars) -> None:
    """In a model without tokens for the marks, where they are spelled."""
    grammar = answer_grammar(smollm2, content=None, tools=[ADD, CLOCK])
    answer = parse_answer(content_of(drawn(grammars.rule(grammar), smollm2, seed), smollm2))
    assert answer.content == ""
    (call,) = answer.tool_calls
    assert call.name in {"add", "clock.now"}
    if call.name == "add":
        assert type(call.arguments["x"]) is int


def test_thinking_comes_before_the_form_and_cannot_be_spelled(qwen3: TextModel, qwen3_grammars: Grammars) -> None:
    assert can_think(qwen3)
    content = Choices(("yes", "no"))
    begin, end = qwen3.literal_id("<think>"), qwen3.literal_id("</think>")
    may = qwen3_grammars.rule(answer_grammar(qwen3, content=content, thinking="may"))
    first = set(allowed(may, qwen3).tolist())
    assert begin in first
    assert {qwen3.encode("yes")[0], qwen3.encode("no")[0]} < first
    assert end not in first
    for token_id in qwen3.encode("<think>\nIs it </ think> or </thinkin"):
        may.accept(token_id)
    inside = set(allowed(may, qwen3).tolist())
    assert end in inside
    assert not inside & set(qwen3.end_token_ids), "the answer does not end in the middle of a thought"
    assert not inside & (set(qwen3.literal_ids) - {end}), "no other mark either"
    for token_id in qwen3.encode(" </"):
        may.accept(token_id)
    (think,) = qwen3.encode("think")
    may.accept(think)
    spelled = set(allowed(may, qwen3).tolist())
    assert not {i for i in spelled if qwen3.token_bytes(i).startswith(b">") and i != end}
    for token_id in [*qwen3.encode(" it is."), end, *qwen3.encode("\n\nyes")]:
        may.accept(token_id)
    assert may.accepts


def test_thinking_that_the_prompt_began_has_to_end(qwen3: TextModel, qwen3_grammars: Grammars) -> None:
    rule = qwen3_grammars.rule(answer_grammar(qwen3, content=Choices(("yes",)), thinking="has begun"))
    for token_id in qwen3.encode("Well.\n</think>\n\nyes"):
        assert token_id in allowed(rule, qwen3)
        rule.accept(token_id)
    assert allowed(rule, qwen3).tolist() == list(qwen3.end_token_ids)


def test_with_tools_a_call_is_as_good_as_the_form(qwen3: TextModel, qwen3_grammars: Grammars) -> None:
    rule = qwen3_grammars.rule(answer_grammar(qwen3, content=ANY_OBJECT, tools=[ADD]))
    first = allowed(rule, qwen3).tolist()
    assert qwen3.literal_id("<tool_call>") in first
    assert qwen3.encode("{")[0] in first
    for token_id in qwen3.encode('<tool_call>\n{"name": "add", "arguments": {"x": 5}}\n</tool_call>'):
        assert token_id in allowed(rule, qwen3)
        rule.accept(token_id)
    assert rule.accepts


# --- what is refused


@pytest.mark.parametrize(
    ("content", "error", "reason"),
    [
        (JsonSchema("{"), InvalidFormat, "the JSON schema is no JSON"),
        (JsonSchema("[1]"), InvalidFormat, "the JSON schema is no JSON object"),
        (JsonSchema("[" * 60_000), InvalidFormat, "the JSON schema is nested more than 64 deep"),
        (JsonSchema('{"items":' * 65 + "{}" + "}" * 65), InvalidFormat, "the JSON schema is nested more than 64 deep"),
        (JsonSchema('{"type": "frob"}'), InvalidFormat, "cannot be used: Invalid type: frob"),
        (JsonSchema('{"not": {}}'), InvalidFormat, r'cannot be used: Unimplemented keys: \["not"\]'),
        (JsonSchema('{"$ref": "http://example.org/schema"}'), InvalidFormat, "retriever does not fetch"),
        (JsonSchema('{"type": "integer", "minimum": 5, "maximum": 3}'), InvalidFormat, "Unsatisfiable schema"),
        (JsonSchema(json.dumps({"enum": ["x" * 70_000]})), FormatTooComplex, "has 700.. characters, more than"),
        (Regex("("), InvalidFormat, "cannot be used: unclosed group"),
        (Regex(r"(a)\1"), InvalidFormat, "backreferences are not supported"),
        (Regex("a(?=b)"), InvalidFormat, "look-around.*not supported"),
        (Regex(""), InvalidFormat, "is empty"),
        (Regex("x" * 70_000), FormatTooComplex, "has 70000 characters"),
        (Regex("(a{1000}){1000}"), FormatTooComplex, "too complex to follow: lexer error: too many expressions"),
        (Choices(()), InvalidFormat, "there are 0 choices"),
        (Choices(("a",) * 257), InvalidFormat, "there are 257 choices"),
        (Choices(("a", "")), InvalidFormat, "choice 2 has 0 characters"),
    ],
)
def test_a_form_that_cannot_be_followed(
    content: JsonSchema | Regex | Choices, error: type[EngineError], reason: str, smollm2: TextModel, grammars: Grammars
) -> None:
    with pytest.raises(error, match=reason) as caught:
        grammars.check(answer_grammar(smollm2, content=content))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_tool_that_cannot_be_followed_is_named(smollm2: TextModel) -> None:
    with pytest.raises(InvalidTools, match=r"the tool bad: the JSON schema is no JSON"):
        answer_grammar(smollm2, content=None, tools=[ADD, Tool("bad", "", "{")])


def test_a_model_without_an_end_token_cannot_keep_a_form() -> None:
    class Endless:
        vocab_size, end_token_ids, literal_ids = 256, (), ()

        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id])

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    with pytest.raises(InvalidFormat, match="no end token"):
        Grammars(Endless()).check('start: "a"')


@pytest.mark.parametrize(
    "content",
    [
        JsonSchema('{"$ref": "#"}'),
        JsonSchema('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
        Regex(r"[^\s\S]"),
    ],
)
def test_a_form_that_no_text_has_is_refused_as_such(
    content: JsonSchema | Regex, smollm2: TextModel, grammars: Grammars
) -> None:
    with pytest.raises(InvalidFormat, match="no text is of that form"):
        grammars.check(answer_grammar(smollm2, content=content))


def test_what_the_parser_cannot_hold_is_too_complex(smollm2: TextModel, grammars: Grammars) -> None:
    texts = {f"p{j}": {"type": "string", "minLength": 1, "maxLength": 900} for j in range(8)}
    branches = [
        {"type": "object", "properties": {f"{i}_{key}": value for key, value in texts.items()}} for i in range(60)
    ]
    with pytest.raises(FormatTooComplex):
        grammars.check(answer_grammar(smollm2, content=JsonSchema(json.dumps({"anyOf": branches}))))


@pytest.mark.parametrize("content", [Choices(("<|im_end|>",)), JsonSchema('{"const": "so <|im_end|> <|im_start|>"}')])
def test_a_text_that_spells_a_control_token_is_answered_as_text(
    content: Choices | JsonSchema, smollm2: TextModel, grammars: Grammars
) -> None:
    grammar = answer_grammar(smollm2, content=content)
    grammars.check(grammar)
    ids = drawn(grammars.rule(grammar), smollm2, 1)
    assert "<|im_end|>" in content_of(ids, smollm2)
    assert not set(ids[:-1]) & set(smollm2.literal_ids)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLenght": 3},
        {"type": "object", "properties": {"a": {"items": {"maxLenght": 3}}}},
        {"anyOf": [{"type": "null"}, {"maxLenght": 3}]},
        {"$defs": {"a": {"maxLenght": 3}}, "$ref": "#/$defs/a"},
    ],
)
def test_a_keyword_that_nobody_knows_is_refused_wherever_it_stands(schema: object, smollm2: TextModel) -> None:
    with pytest.raises(InvalidFormat, match=r'unknown keywords: \["maxLenght"\]'):
        answer_grammar(smollm2, content=JsonSchema(json.dumps(schema)))


def test_names_and_values_of_a_schema_are_no_keywords(smollm2: TextModel, grammars: Grammars) -> None:
    schema = {
        "title": "t",
        "x-source": "ours",
        "type": "object",
        "properties": {"maxLenght": {"enum": [{"maxLenght": 1}]}, "b": {"const": {"c": 1}, "default": {"d": 1}}},
        "required": ["maxLenght"],
    }
    grammars.check(answer_grammar(smollm2, content=JsonSchema(json.dumps(schema))))
