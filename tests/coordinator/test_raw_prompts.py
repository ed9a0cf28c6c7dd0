"""What a model goes on writing without its chat template: the tokens are the prompt's own, and the answer is text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import Client, Cluster, all_of, code_of, ids_of
from test_transfer import export, import_

from kvferry.client.sdk import AsyncClient, RawPrompt, Token
from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.proto.v1 import chat_pb2, common_pb2

ONCE = chat_pb2.RawPrompt(text="Once upon a time")


async def one_worker(cluster: Cluster) -> tuple[Client, Any]:
    worker = await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    return client, worker


async def go_on(client: Client, session: str, prompt: chat_pb2.RawPrompt = ONCE, **fields: Any) -> list[int]:
    return ids_of(await all_of(client.generate(session, messages=[], raw_prompt=prompt, **fields)))


async def test_the_prompt_s_tokens_are_the_text_s_and_nothing_else(cluster: Cluster, model: LoadedModel) -> None:
    client, worker = await one_worker(cluster)
    session = await client.new_session()
    answer = await go_on(client, session)
    ids = model.text.encode("Once upon a time")
    assert list(worker.requests[-1].token_ids) == ids
    more = await go_on(client, session, chat_pb2.RawPrompt(text=" there"))
    assert list(worker.requests[-1].token_ids) == [*ids, *answer, *model.text.encode(" there")]
    kept = await client.get(session)
    assert list(kept.token_ids) == [*ids, *answer, *model.text.encode(" there"), *more]
    assert [list(turn.messages) for turn in kept.turns] == [[], []]


async def test_tokens_are_taken_as_they_are(cluster: Cluster, model: LoadedModel) -> None:
    client, worker = await one_worker(cluster)
    ids = [*model.text.encode("Once"), *model.text.encode("<|im_end|>")]
    await go_on(client, await client.new_session(), chat_pb2.RawPrompt(token_ids=ids))
    assert list(worker.requests[-1].token_ids) == ids


async def test_samples_are_drawn_of_it_as_of_messages(cluster: Cluster) -> None:
    await one_worker(cluster)
    async with AsyncClient(cluster.address) as client:
        session = await client.create_session()
        prompt = RawPrompt("Once upon a time")
        answers = await session.samples(prompt, 2, seed=3, max_tokens=5).collect()
        again = session.resume_samples(2)
        ids: list[list[int]] = [[], []]
        async for one in again:
            if isinstance(one.event, Token):
                ids[one.sample].append(one.event.token_id)
        assert [tuple(one) for one in ids] == [answer.token_ids for answer in answers]
        assert again.turn_id == answers[0].turn_id
        alone = await client.create_session()
        assert (await alone.generate(prompt, seed=4, max_tokens=5).collect()).token_ids == answers[1].token_ids


async def test_the_same_turn_id_with_another_prompt_is_another_turn(cluster: Cluster) -> None:
    client, _ = await one_worker(cluster)
    session = await client.new_session()
    first = await go_on(client, session, turn_id="t")
    assert await go_on(client, session, turn_id="t") == first
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await go_on(client, session, chat_pb2.RawPrompt(text="Twice"), turn_id="t")
    assert code_of(refused.value) == "turn_exists"


async def test_messages_and_raw_prompts_do_not_mix_in_a_session(cluster: Cluster) -> None:
    client, _ = await one_worker(cluster)
    raw, chat = await client.new_session(), await client.new_session()
    await go_on(client, raw)
    await all_of(client.generate(chat, "Hi"))
    with pytest.raises(grpc.aio.AioRpcError, match="turns have raw prompts") as refused:
        await all_of(client.generate(raw, "Hi"))
    assert code_of(refused.value) == "invalid_message"
    with pytest.raises(grpc.aio.AioRpcError, match="turns have messages"):
        await go_on(client, chat)


async def test_it_survives_export_and_import(new_cluster: Callable[..., Any]) -> None:
    (here, _), (there, worker) = [await one_worker(await new_cluster()) for _ in range(2)]
    session = await here.new_session()
    await go_on(here, session)
    await import_(there, await export(here, session))
    assert list((await there.get(session)).token_ids) == list((await here.get(session)).token_ids)
    await go_on(there, session)
    assert list(worker.requests[-1].token_ids[:10]) == list((await here.get(session)).token_ids[:10])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"raw_prompt": chat_pb2.RawPrompt()}, "empty_prompt"),
        ({"raw_prompt": chat_pb2.RawPrompt(text="a", token_ids=[1])}, "invalid_request"),
        ({"raw_prompt": chat_pb2.RawPrompt(token_ids=[10**6])}, "invalid_message"),
        ({"raw_prompt": chat_pb2.RawPrompt(token_ids=[-1])}, "invalid_message"),
        ({"raw_prompt": chat_pb2.RawPrompt(token_ids=[1] * 9_000)}, "prompt_too_long"),
        ({"tools": [chat_pb2.Tool(name="t")]}, "invalid_request"),
        ({"thinking": False}, "invalid_request"),
        ({"messages": [chat_pb2.ChatMessage(role="user", content="x")]}, "invalid_request"),
    ],
)
async def test_what_cannot_be_is_refused(cluster: Cluster, fields: dict[str, Any], code: str) -> None:
    client, _ = await one_worker(cluster)
    request = chat_pb2.GenerateRequest(
        **{"session_id": await client.new_session(), "raw_prompt": ONCE, "max_tokens": 4, **fields}
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in client.stub.Generate(request):
            pass
    assert code_of(refused.value) == code


async def test_marks_in_the_answer_are_text(cluster: Cluster) -> None:
    client, _ = await one_worker(cluster)
    session = await client.new_session()
    events = await all_of(client.generate(session, messages=[], raw_prompt=chat_pb2.RawPrompt(text="<think>\n")))
    tokens = [e.token for e in events if e.HasField("token")]
    assert all(not part.HasField("reasoning") for token in tokens for part in token.parts)
    assert "".join(token.text for token in tokens) + events[-1].finished.tail_text == events[-1].finished.answer.content
    assert events[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_session_expires_when_it_says_so_and_no_sooner(cluster: Cluster) -> None:
    client, _ = await one_worker(cluster)
    request = chat_pb2.CreateSessionRequest(session_id="s", expires_after_seconds=3600)
    assert (await client.stub.CreateSession(request)).session.expires_after_seconds == 3600
    fork = await client.stub.ForkSession(chat_pb2.ForkSessionRequest(session_id="s", new_session_id="f"))
    assert fork.session.expires_after_seconds == 3600
