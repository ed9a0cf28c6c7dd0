"""Log-probabilities of tokens that are parts of characters: one entry for each, with its own bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvferry.client import Finished, FinishReason, Token, TokenLogprob
from kvferry.engine.text.detokenizer import Detokenizer
from kvferry.engine.text.stop import StopWatcher
from kvferry.gateway.choices import ChatChoice
from kvferry.gateway.completions import TextChoice
from kvferry.gateway.response_events import ResponseStream, base_response

TEXT = "🦜🦜𝕏é"


class Table:
    """Token n is the n-th of these texts."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def events_of(
    tokens: list[bytes], reason: FinishReason = FinishReason.LENGTH, stops: tuple[str, ...] = ()
) -> list[Token | Finished]:
    """As the coordinator makes them; with END the last token is the end."""
    detokenizer, watcher, events, tail = Detokenizer(Table(tokens)), StopWatcher(stops), [], ""
    for number, raw in enumerate(tokens):
        is_end = reason is FinishReason.END and number == len(tokens) - 1
        text, stopped = ("", False) if is_end else watcher.push(detokenizer.push(number))
        others = (TokenLogprob(number, -1.0, raw.decode(errors="replace"), raw), TokenLogprob(99, -2.0, "�", b"\xf0"))
        events.append(Token(number, number, text, -1.0, others, content=text, token_bytes=raw))
        if stopped:
            break
    else:
        tail = watcher.push(detokenizer.flush())[0] + watcher.flush()
    end = Finished(reason, 1, len(tokens), tail, 0.0, 0.0, 0.0, 1, tail_content=tail)
    return [*events, end]


def chat_of(events: list[Token | Finished]) -> tuple[str, list[dict]]:
    """The content and its entries, whole; what is streamed is the same."""
    choice, streamed = ChatChoice(0, with_logprobs=True), []
    for event in events:
        if (part := choice.push(event)) is not None and part["logprobs"] is not None:
            streamed += part["logprobs"]["content"]
    whole = choice.whole()
    assert whole["logprobs"]["content"] == streamed
    return whole["message"]["content"], streamed


def joined(entries: list[dict]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


BYTES = [bytes([byte]) for byte in TEXT.encode()]
PAIRS = [TEXT.encode()[at : at + 2] for at in range(0, len(TEXT.encode()), 2)]


@pytest.mark.parametrize("tokens", [BYTES, PAIRS, [b"Hi ", *PAIRS, b", you"], [b"Hi \xf0", b"\x9f\xa6", b"\x9c."]])
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.END])
def test_each_token_has_its_own_bytes(tokens, reason):
    events = events_of([*tokens, b"<|end|>"] if reason is FinishReason.END else tokens, reason)
    content, entries = chat_of(events)
    assert [bytes(entry["bytes"]) for entry in entries] == tokens
    assert joined(entries).decode() == content == b"".join(tokens).decode()
    assert bytes(entries[0]["top_logprobs"][1]["bytes"]) == b"\xf0"


def test_a_token_that_is_part_of_a_character_is_shown_as_bytes():
    _, entries = chat_of(events_of(PAIRS[:2]))
    assert [entry["token"] for entry in entries] == [r"\xf0\x9f", r"\xa6\x9c"]


def test_an_answer_that_ends_within_a_character_has_all_its_tokens():
    content, entries = chat_of(events_of([b"Hi ", b"\xf0\x9f"]))
    assert (content, joined(entries)) == ("Hi �", b"Hi \xf0\x9f")
    content, entries = chat_of(events_of([b"Hi ", b"\xf0\x9f", b"<|end|>"], FinishReason.END))
    assert (content, joined(entries)) == ("Hi �", b"Hi \xf0\x9f")


@pytest.mark.parametrize("tokens", [[b"x", b"a", b"b", b"c"], [b"xa", b"b", b"c"], [*BYTES, b"a", b"bcd"]])
def test_what_a_stop_string_takes_away_has_no_entries(tokens):
    content, entries = chat_of(events_of(tokens, FinishReason.STOP_STRING, ("abc",)))
    assert joined(entries).decode().removesuffix("a") == content
    assert all(entry["token"] not in {"b", "c", "bcd"} for entry in entries)


def test_the_old_shape_counts_whole_characters():
    choice = TextChoice(0)
    for event in events_of([b"Hi ", *PAIRS, b"!"]):
        choice.push(event)
    told = choice.whole()["logprobs"]
    assert len(told["tokens"]) == len(PAIRS) + 2
    assert told["tokens"][:3] == ["Hi ", r"bytes:\xf0\x9f", r"bytes:\xa6\x9c"]
    assert told["text_offset"][:4] == [0, 3, 3, 4]
    assert told["text_offset"][-1] == len("Hi " + TEXT)
    assert r"bytes:\xf0" in told["top_logprobs"][1]
    assert all(a <= b for a, b in pairwise(told["text_offset"]))


def response_of(events: list[Token | Finished]) -> tuple[str, list[dict]]:
    stream, streamed = ResponseStream(base_response("resp_x", 0, "m", None, "queued")), []
    for event in events:
        for told in stream.push(event):
            if told["type"] == "response.output_text.delta":
                streamed += told["logprobs"]
    (part,) = stream.response["output"][-1]["content"]
    assert part["logprobs"] == streamed
    return part["text"], streamed


@pytest.mark.parametrize("tokens", [BYTES, PAIRS, [b"Hi \xf0", b"\x9f\xa6", b"\x9c."]])
def test_a_response_has_an_entry_for_each_token(tokens):
    text, entries = response_of(events_of([*tokens, b"<|end|>"], FinishReason.END))
    assert [bytes(entry["bytes"]) for entry in entries] == tokens
    assert joined(entries).decode() == text


def test_a_responses_entries_are_those_of_its_text_alone():
    def token(number: int, raw: bytes, **parts: str) -> Token:
        return Token(number, number, raw.decode(errors="ignore"), -1.0, (), token_bytes=raw, **parts)

    thought = [
        token(0, b"<think>"), token(1, b"Hm", reasoning="Hm"), token(2, b"</think>"), token(3, b"\n\n"),
        token(4, b"\xf0\x9f"), token(5, b"\xa6\x9c", content="🦜"), token(6, b"\n"), token(7, b"hi", content="\nhi"),
        token(8, b"<|end|>"), Finished(FinishReason.END, 1, 9, "", 0.0, 0.0, 0.0, 1),
    ]  # fmt: skip
    text, entries = response_of(thought)
    assert (text, joined(entries)) == ("🦜\nhi", "🦜\nhi".encode())


def test_older_coordinators_tell_no_bytes():
    events = [Token(0, 0, "Hi", -1.0, (TokenLogprob(0, -1.0, "Hi"),), content="Hi")]
    _, (entry,) = chat_of([*events, Finished(FinishReason.LENGTH, 1, 1, "", 0.0, 0.0, 0.0, 1)])
    assert (entry["token"], bytes(entry["bytes"])) == ("Hi", b"Hi")


SCHEMA = {"enum": [TEXT]}


def test_with_real_nodes(client):
    asked = {"model": "any", "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "Go"}]
    fields = {**asked, "messages": messages, "response_format": form, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**fields)
    (choice,) = answer.choices
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content == f'"{TEXT}"'
    assert len(entries) == answer.usage.completion_tokens - 1, "all but the end token"
    assert len(entries) > len(TEXT) + 2
    include = ["message.output_text.logprobs"]
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    response = client.responses.create(**asked, input="Go", text=text, include=include, top_logprobs=2)
    told = response.output[0].content[0].logprobs
    assert [entry.bytes for entry in told] == [entry.bytes for entry in entries]
