"""Tools, thinking and the form of an answer, from a client's request to the parts of what it gets back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import Client, Cluster, all_of, code_of, ids_of, take_tokens
from scripted_worker import Script

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.engine.text.model import TextModel
from kvferry.proto.v1 import chat_pb2, common_pb2

WEATHER = chat_pb2.Tool(
    name="weather",
    description="Of a city.",
    parameters='{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
)
CLOCK = chat_pb2.Tool(name="clock")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools ' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + ' ' + (m.reasoning_content or '') + m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{%- if enable_thinking is defined %}"
    "{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}{% endif %}"
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="session")
def thinker(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A small vocabulary with a token for each mark, and a template that knows tools and thinking."""
    folder = tmp_path_factory.mktemp("thinker") / "thinker"
    shutil.copytree(golden / "tokenizer_qwen_tiny", folder)
    description = json.loads((folder / "tokenizer.json").read_text())
    known = {added["content"] for added in description["added_tokens"]}
    n_tokens = 1 + max(added["id"] for added in description["added_tokens"])
    for number, mark in enumerate(mark for mark in MARKS if mark not in known):
        like = description["added_tokens"][-1]
        description["added_tokens"].append({**like, "id": n_tokens + number, "content": mark, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(description))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return LoadedModel(text=TextModel.load(folder), context_length=4096)


@pytest.fixture
async def thinking_cluster(new_cluster: Callable[..., Any], thinker: LoadedModel) -> Cluster:
    return await new_cluster(model=thinker)


async def answer(
    cluster: Cluster, client: Client, session: str, text: str, **request: Any
) -> tuple[list[chat_pb2.TurnEvent], list[chat_pb2.AnswerPart]]:
    """A turn that is answered with ``text``: its events, and the parts in them."""
    worker = cluster.worker_named("a")
    worker.script.answer = cluster._models[0].text.encode(text)
    events = await all_of(client.generate(session, max_tokens=500, **request))
    return events, parts_of(events)


def parts_of(events: list[chat_pb2.TurnEvent]) -> list[chat_pb2.AnswerPart]:
    parts: list[chat_pb2.AnswerPart] = []
    for event in events:
        if event.HasField("token") and event.token.is_content:
            assert not event.token.parts
            parts.append(chat_pb2.AnswerPart(content=event.token.text))
        parts += event.token.parts
    return [*parts, *events[-1].finished.tail_parts]


def joined(parts: list[chat_pb2.AnswerPart], kind: str) -> str:
    return "".join(getattr(part, kind) for part in parts)


async def started(cluster: Cluster) -> tuple[Client, str]:
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    return client, await client.new_session()


async def refusal(client: Client, session: str, **request: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await all_of(client.generate(session, **request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    sentence = caught.value.details() or ""
    assert "\n" not in sentence
    return code_of(caught.value), sentence


async def test_thinking_and_content_come_apart_as_they_come(cluster: Cluster) -> None:
    client, session = await started(cluster)
    text = "<think>\nHm, naïve — 🤔.\n</think>\n\nThe answer is 🌊: five.\n"
    events, parts = await answer(cluster, client, session, text)
    assert "".join(e.token.text for e in events) + events[-1].finished.tail_text == text
    assert joined(parts, "reasoning") == "Hm, naïve — 🤔."
    assert joined(parts, "content") == "The answer is 🌊: five.\n"
    assert sum(part.HasField("reasoning") for part in parts) > 4, "piece by piece"
    assert sum(part.HasField("content") for part in parts) > 4
    done = events[-1].finished.answer
    assert (done.reasoning, done.content, done.is_thinking) == ("Hm, naïve — 🤔.", "The answer is 🌊: five.\n", False)
    plain, plain_parts = await answer(cluster, client, session, "Just words < and > more.")
    assert not plain[-1].finished.answer.HasField("reasoning")
    assert joined(plain_parts, "content") == plain[-1].finished.answer.content == "Just words < and > more."
    assert (await client.get(session)).turns[0].parsed == done


async def test_a_stop_string_stops_where_it_always_did(cluster: Cluster) -> None:
    client, session = await started(cluster)
    events, parts = await answer(cluster, client, session, "<think>One two</think>Three four five", stop=["four"])
    assert events[-1].finished.reason == common_pb2.FINISH_REASON_STOP_STRING
    assert "".join(e.token.text for e in events) == "<think>One two</think>Three "
    assert (joined(parts, "reasoning"), joined(parts, "content")) == ("One two", "Three ")
    events, parts = await answer(cluster, client, session, "<think>One two</think>Three", stop=["wo</th"])
    assert "".join(e.token.text for e in events) == "<think>One t"
    assert events[-1].finished.answer == chat_pb2.ParsedAnswer(reasoning="One t", is_thinking=True)
    assert joined(parts, "reasoning") == "One t"


async def test_a_conversation_with_tools(thinking_cluster: Cluster, thinker: LoadedModel) -> None:
    """Calls come whole and with ids, results go back, and every token stays what it was."""
    client, session = await started(thinking_cluster)
    events, parts = await answer(
        thinking_cluster, client, session, f"<think>Look.</think>Let me see.\n{CALL}\n{CALL}", tools=[WEATHER, CLOCK]
    )
    calls = [part.tool_call for part in parts if part.HasField("tool_call")]
    turn_id = events[0].turn_id
    assert [(c.id, c.name, c.arguments) for c in calls] == [
        (f"{turn_id}.{n}", "weather", '{"city": "Rome"}') for n in range(2)
    ]
    done = events[-1].finished.answer
    assert (done.reasoning, done.content, list(done.tool_calls)) == ("Look.", "Let me see.", calls)
    requests = thinking_cluster.worker_named("a").requests
    prompt = thinker.text.decode(requests[0].token_ids)
    assert prompt.startswith('<|im_start|>tools [{"type": "function", "function": {"name": "weather", "description": ')
    assert requests[0].grammar == ""
    results = [chat_pb2.ChatMessage(role="tool", content=f"{n} C", tool_call_id=calls[n].id) for n in range(2)]
    again, _ = await answer(thinking_cluster, client, session, "Warm.", messages=results, tools=[WEATHER, CLOCK])
    before = [*requests[0].token_ids, *ids_of(events)]
    assert list(requests[1].token_ids[: len(before)]) == before, "thinking and calls stay where they are"
    added = thinker.text.decode(requests[1].token_ids[len(before) :])
    assert added == "<|im_start|>tool 0 C<|im_end|><|im_start|>tool 1 C<|im_end|><|im_start|>assistant "
    assert again[-1].finished.answer.content == "Warm."
    kept = (await client.get(session)).turns
    assert list(kept[1].messages) == results
    assert list(kept[0].parsed.tool_calls) == calls
    read_again = [event async for event in client.resume(session, turn_id)]
    assert parts_of(read_again) == parts
    assert read_again[-1].finished.answer == done


async def test_the_tools_of_a_session_are_those_it_began_with(cluster: Cluster) -> None:
    client, session = await started(cluster)
    await answer(cluster, client, session, "Hi.", tools=[WEATHER])
    code, sentence = await refusal(client, session, tools=[CLOCK])
    assert (code, sentence[:50]) == ("invalid_tools", "the model is told of the tools with a session's fi")
    assert (await client.get(session)).session.n_turns == 1
    events, _ = await answer(cluster, client, session, CALL)  # left out: the same
    assert events[-1].finished.answer.tool_calls[0].name == "weather"
    without = await client.new_session()
    events, parts = await answer(cluster, client, without, CALL)
    assert joined(parts, "content") == events[-1].finished.answer.content == CALL, "no tools, no calls"


async def test_thinking_on_and_off_is_the_template_s(thinking_cluster: Cluster, thinker: LoadedModel) -> None:
    client, session = await started(thinking_cluster)
    requests = thinking_cluster.worker_named("a").requests
    on, _ = await answer(thinking_cluster, client, session, "Hm.</think>Yes.", thinking=True)
    assert thinker.text.decode(requests[0].token_ids).endswith("assistant <think>")
    assert (on[-1].finished.answer.reasoning, on[-1].finished.answer.content) == ("Hm.", "Yes.")
    off, _ = await answer(thinking_cluster, client, session, "No.", thinking=False)
    assert thinker.text.decode(requests[1].token_ids).endswith("assistant <think></think>")
    assert off[-1].finished.answer == chat_pb2.ParsedAnswer(content="No.")
    await answer(thinking_cluster, client, session, "Well.")
    assert thinker.text.decode(requests[2].token_ids).endswith("assistant ")


@pytest.mark.parametrize(
    ("request_", "code", "sentence"),
    [
        ({"format": chat_pb2.OutputFormat(json_schema='{"type": "frob"}')}, "invalid_format", "Invalid type: frob"),
        ({"format": chat_pb2.OutputFormat(regex="(")}, "invalid_format", "unclosed group"),
        ({"format": chat_pb2.OutputFormat(regex="(a{1000}){1000}")}, "format_too_complex", "too many expressions"),
        ({"format": chat_pb2.OutputFormat(choices=chat_pb2.Choices())}, "invalid_format", "there are 0 choices"),
        ({"tool_choice": chat_pb2.TOOL_CHOICE_REQUIRED}, "invalid_tools", "the session has no tools"),
        (
            {"tool_choice": chat_pb2.TOOL_CHOICE_REQUIRED, "tool_name": "moon", "tools": [WEATHER, CLOCK]},
            "invalid_tools",
            "there is no tool 'moon'; the session's tools are weather, clock",
        ),
        (
            {
                "tool_choice": chat_pb2.TOOL_CHOICE_REQUIRED,
                "tools": [chat_pb2.Tool(name="x", parameters='{"not": {}}')],
            },
            "invalid_format",
            "Unimplemented keys",
        ),
    ],
)
async def test_a_form_that_cannot_be_kept_is_refused_before_anything_changes(
    cluster: Cluster, request_: dict[str, Any], code: str, sentence: str
) -> None:
    client, session = await started(cluster)
    told = await refusal(client, session, **request_)
    assert told[0] == code
    assert sentence in told[1]
    got = await client.get(session)
    assert (got.session.n_turns, got.session.open_turn_id, list(got.turns)) == (0, "", [])
    assert cluster.worker_named("a").requests == []


async def test_the_same_grammar_goes_to_every_node_and_after_a_restart(
    thinking_cluster: Cluster, thinker: LoadedModel
) -> None:
    slow = await thinking_cluster.worker("a", Script(token_seconds=0.02, break_after=3, answer=[5] * 400))
    client = thinking_cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    schema = chat_pb2.OutputFormat(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}')
    stream = client.generate(session, format=schema, max_tokens=200)
    await take_tokens(stream, 8)
    await thinking_cluster.restart()
    client = thinking_cluster.client()
    await client.until_nodes(1)
    slow.script.break_after = None
    await take_tokens(client.resume(session), 8)
    grammars = {request.grammar for request in slow.requests}
    assert len(slow.requests) >= 4
    (grammar,) = grammars
    think, end = (thinker.text.literal_id(mark) for mark in MARKS[:2])
    assert f"start: (<[{think}]> THOUGHT <[{end}]> BLANK)? answer" in grammar
    assert '"a": {"type": "integer"}' in grammar
