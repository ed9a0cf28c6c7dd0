"""What a client sees of sessions and turns while the fleet is well."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import Cluster, all_of, code_of, eventually, ids_of, kinds_of, retry_after_ms, take_tokens
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from scripted_worker import Script, scripted_answer

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.engine.text.model import ChatMessage
from kvferry.proto.v1 import chat_pb2, common_pb2

# Turns.


async def test_a_turn_is_answered_with_numbered_tokens_and_a_finish(cluster: Cluster, model: LoadedModel) -> None:
    worker = await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = await all_of(client.generate(session, "Hello?", max_tokens=5, seed=3))
    prompt = model.text.first_turn([ChatMessage("user", "Hello?")])
    assert kinds_of(events) == ["started", "placed", *["token"] * 5, "finished"]
    assert ids_of(events) == scripted_answer(prompt, 3, 5)
    assert [e.sequence for e in events] == [0, 0, 0, 1, 2, 3, 4, 5]
    placed = events[1].placed
    assert (placed.node_id, placed.epoch, placed.prefix.n_computed) == ("a", 1, len(prompt))
    assert placed.candidates[0].reason.startswith("chosen: ")
    done = events[-1].finished
    assert (done.reason, done.n_answer_tokens, done.n_placements) == (common_pb2.FINISH_REASON_LENGTH, 5, 1)
    text = "".join(e.token.text for e in events) + done.tail_text
    assert text == model.text.decode(ids_of(events))
    request = worker.requests[0]
    assert list(request.token_ids) == prompt
    assert list(request.end_token_ids) == list(model.text.end_token_ids)
    assert request.sampling.HasField("temperature")


async def test_a_second_turn_continues_the_tokens_of_the_first(cluster: Cluster, model: LoadedModel) -> None:
    worker = await cluster.worker("a", Script(end_after=4))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session("chat")
    first = await all_of(client.generate(session, "One?"))
    second = await all_of(client.generate(session, "Two?"))
    assert first[-1].finished.reason == common_pb2.FINISH_REASON_END
    before = [*model.text.first_turn([ChatMessage("user", "One?")]), *ids_of(first)]
    sent = list(worker.requests[1].token_ids)
    assert sent[: len(before)] == before
    assert second[0].started.n_history_tokens == len(before)
    assert second[0].started.n_prompt_tokens == len(sent)
    assert second[1].placed.prefix.n_resident == len(before) - 1
    got = await client.get(session)
    assert list(got.token_ids) == [*sent, *ids_of(second)]
    assert got.session.n_tokens == len(got.token_ids)
    assert (got.session.n_turns, got.session.epoch, got.session.open_turn_id, got.session.last_node_id) == (
        2,
        2,
        "",
        "a",
    )
    assert [t.state for t in got.turns] == [chat_pb2.TURN_STATE_FINISHED] * 2
    assert [m.content for t in got.turns for m in t.messages] == ["One?", "Two?"]
    assert got.turns[0].answer == model.text.decode(ids_of(first)[:-1])
    assert got.turns[0].placements[0].node_id == "a"
    assert got.turns[0].placements[0].prefix.n_computed > 0


async def test_a_stop_string_ends_the_answer_and_stops_the_node(cluster: Cluster, model: LoadedModel) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.005))
    client = cluster.client()
    await client.until_nodes(1)
    answer = scripted_answer(model.text.first_turn([ChatMessage("user", "Go")]), 0, 40)
    text = model.text.decode(answer)
    stop = text[len(model.text.decode(answer[:6])) :][:4]
    session = await client.new_session()
    events = await all_of(client.generate(session, "Go", max_tokens=1000, stop=[stop]))
    seen = "".join(e.token.text for e in events) + events[-1].finished.tail_text
    assert events[-1].finished.reason == common_pb2.FINISH_REASON_STOP_STRING
    assert seen == text[: text.index(stop)]
    await eventually(lambda: worker.stopped and worker.n_running == 0)
    assert worker.stopped[0].epoch == 1


async def test_logprobs_come_with_text(cluster: Cluster) -> None:
    await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    wanted = common_pb2.SamplingSettings(logprobs=True, top_logprobs=1)
    live = await all_of(client.generate(session, max_tokens=3, sampling=wanted))
    replayed = await all_of(client.resume(session))
    for events in (live, replayed):
        tokens = [e.token for e in events if e.HasField("token")]
        assert [t.logprob for t in tokens] == [0.0, -1.0, -2.0]
        assert all(t.top_logprobs[0].text for t in tokens)


async def test_asking_again_with_the_same_turn_id_attaches_and_starts_nothing(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    same = {"turn_id": "t1", "max_tokens": 20}
    streams = await asyncio.gather(*(all_of(client.generate(session, **same)) for _ in range(5)))
    streams.append(await all_of(client.generate(session, **same)))
    assert all(ids_of(s) == ids_of(streams[0]) for s in streams)
    assert len(worker.requests) == 1
    assert (await client.get(session)).session.n_turns == 1
    with pytest.raises(grpc.aio.AioRpcError, match="begun by another request") as refused:
        await all_of(client.generate(session, "Something else", **same))
    assert (code_of(refused.value), refused.value.code()) == ("turn_exists", grpc.StatusCode.ALREADY_EXISTS)


async def test_a_turn_goes_on_when_its_client_is_gone_and_any_other_picks_it_up_anywhere(cluster: Cluster) -> None:
    await cluster.worker("a", Script(token_seconds=0.01))
    client, other = cluster.client(), cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, turn_id="t1", max_tokens=40)
    first = await take_tokens(events, 5)
    await events.aclose()
    while_running = await all_of(other.resume(session, "t1", from_index=3))
    when_finished = [await all_of(other.resume(session, "", from_index=n)) for n in (0, 17, 40)]
    whole = ids_of(when_finished[0])
    assert len(whole) == 40
    assert whole[:5] == first
    assert ids_of(while_running) == whole[3:]
    assert ids_of(when_finished[1]) == whole[17:]
    assert kinds_of(when_finished[2]) == ["started", "placed", "finished"]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await all_of(other.resume(session, "t1", from_index=41))
    assert (code_of(refused.value), refused.value.code()) == ("index_out_of_range", grpc.StatusCode.OUT_OF_RANGE)


async def test_a_slow_reader_delays_nobody(cluster: Cluster) -> None:
    await cluster.worker("a", Script(tokens_per_message=64))
    client, slow = cluster.client(), cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    reading = client.generate(session, turn_id="t1", max_tokens=6000)
    await take_tokens(reading, 1)
    idle = slow.stub.Resume(chat_pb2.ResumeRequest(session_id=session, turn_id="t1"))
    await idle.read()  # and then nothing for as long as the turn lasts
    quick = [event async for event in reading]
    assert quick[-1].finished.n_answer_tokens == 6000
    late = [(await idle.read()).event for _ in range(6002)]
    assert len([e for e in late if e.HasField("token")]) == 6000
    assert late[-1].HasField("finished")


async def test_cancelling_keeps_what_was_said_and_stops_the_node(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, turn_id="t1", max_tokens=500)
    first = await take_tokens(events, 5)
    await client.stub.CancelTurn(chat_pb2.CancelTurnRequest(session_id=session, turn_id="t1"))
    rest = await all_of(events)
    assert rest[-1].finished.reason == common_pb2.FINISH_REASON_CANCELLED
    answer = first + ids_of(rest)
    assert list((await client.get(session)).token_ids)[-len(answer) :] == answer
    await eventually(lambda: worker.n_running == 0 and worker.stopped)
    await client.stub.CancelTurn(chat_pb2.CancelTurnRequest(session_id=session, turn_id="t1"))  # no error
    assert ids_of(await all_of(client.generate(session, "And on", max_tokens=2)))


# Mistakes.


async def refused(events: Any) -> tuple[str, grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await all_of(events)
    return code_of(error.value), error.value.code(), str(error.value.details())


async def test_a_refused_request_leaves_nothing_behind(cluster: Cluster) -> None:
    await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert (await refused(client.generate(session, "")))[:2] == ("empty_prompt", invalid)
    assert (await refused(client.generate("nobody")))[:2] == ("unknown_session", grpc.StatusCode.NOT_FOUND)
    assert (await refused(client.generate(session, turn_id="a b")))[:2] == ("invalid_name", invalid)
    for bad in (-1.0, float("nan")):
        assert (await refused(client.generate(session, sampling=common_pb2.SamplingSettings(temperature=bad))))[:2] == (
            "invalid_sampling",
            invalid,
        )
    robot = [chat_pb2.ChatMessage(role="robot", content="hi")]
    assert (await refused(client.generate(session, messages=robot)))[:2] == ("invalid_message", invalid)
    code, status, sentence = await refused(client.generate(session, "word " * 9000))
    assert (code, status) == ("prompt_too_long", invalid)
    assert "the context holds 8192" in sentence
    assert (await refused(client.resume(session)))[:2] == ("unknown_turn", grpc.StatusCode.NOT_FOUND)
    got = await client.get(session)
    assert (len(got.turns), got.session.open_turn_id, got.session.epoch) == (0, "", 0)


async def test_a_session_answers_one_turn_at_a_time(cluster: Cluster) -> None:
    await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, turn_id="t1", max_tokens=500)
    await take_tokens(events, 1)
    code, status, sentence = await refused(client.generate(session, "Another", turn_id="t2"))
    assert (code, status) == ("session_busy", grpc.StatusCode.FAILED_PRECONDITION)
    assert "t1" in sentence


async def test_a_system_message_in_mid_conversation_is_refused(cluster: Cluster) -> None:
    await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    messages = [
        chat_pb2.ChatMessage(role="system", content="Be brief."),
        chat_pb2.ChatMessage(role="user", content="Hi"),
    ]
    await all_of(client.generate(session, messages=messages))
    assert (await refused(client.generate(session, messages=messages)))[0] == "invalid_message"


async def test_too_many_open_turns_are_refused_at_once_with_a_hint(new_cluster: Callable[..., Any]) -> None:
    cluster = await new_cluster(max_open_turns=1)
    await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    events = client.generate(await client.new_session(), max_tokens=500)
    await take_tokens(events, 1)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await all_of(client.generate(await client.new_session()))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of(error.value) == "queue_full"
    assert retry_after_ms(error.value) > 0


# Sessions.


async def test_sessions_are_listed_page_by_page(cluster: Cluster) -> None:
    client = cluster.client()
    made = {await client.new_session() for _ in range(7)}
    seen, token, n_pages = [], "", 0
    while n_pages == 0 or token:
        page = await client.stub.ListSessions(chat_pb2.ListSessionsRequest(page_size=3, page_token=token))
        seen += [s.session_id for s in page.sessions]
        token, n_pages = page.next_page_token, n_pages + 1
    assert (n_pages, len(seen), set(seen)) == (3, 7, made)


async def test_a_fork_goes_on_from_the_turns_it_was_given(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session("base")
    for text in ("One", "Two"):
        await all_of(client.generate(session, text))
    base = await client.get(session)
    fork = await client.stub.ForkSession(
        chat_pb2.ForkSessionRequest(session_id=session, new_session_id="fork", n_turns=1)
    )
    assert (fork.session.n_turns, fork.session.forked_from) == (1, "base")
    await all_of(client.generate("fork", "Three"))
    n_first = fork.session.n_tokens
    assert list(worker.requests[-1].token_ids)[:n_first] == list(base.token_ids)[:n_first]
    assert list((await client.get("base")).token_ids) == list(base.token_ids)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.stub.ForkSession(chat_pb2.ForkSessionRequest(session_id=session, new_session_id="fork"))
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_turn_is_asked_anew_and_edited_in_a_fork_from_before_it(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await all_of(client.generate(session, "One"))
    first = ids_of(await all_of(client.generate(session, "Two", seed=1)))
    answers = []
    for name, text, seed in (("again", "Two", 1), ("anew", "Two", 2), ("edited", "Three", 1)):
        await client.stub.ForkSession(chat_pb2.ForkSessionRequest(session_id=session, new_session_id=name, n_turns=1))
        events = await all_of(client.generate(name, text, seed=seed))
        answers.append(ids_of(events))
        placed = next(e.placed for e in events if e.HasField("placed"))
        n_history = len(worker.requests[0].token_ids) + 8
        assert next(c.n_resident for c in placed.candidates if c.chosen) >= n_history - 1  # its rows are shared
    again, anew, edited = answers
    assert again == first
    assert first not in (anew, edited)


async def test_deleting_a_session_ends_its_turn_and_tells_the_nodes(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, max_tokens=500)
    await take_tokens(events, 3)
    await client.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id=session))
    assert (await all_of(events))[-1].finished.reason == common_pb2.FINISH_REASON_CANCELLED
    await eventually(lambda: worker.dropped == [session])
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.get(session)
    assert code_of(error.value) == "unknown_session"


# The process.


async def test_status_health_and_reflection(cluster: Cluster, model: LoadedModel) -> None:
    await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    await all_of(client.generate(await client.new_session()))
    status = await client.status()
    assert (status.model, status.n_predictions, status.n_sessions, status.n_open_turns, status.n_turns_finished) == (
        model.text.model_name, 1, 1, 0, 1,
    )  # fmt: skip
    assert [(n.node_id, n.state, n.fingerprint) for n in status.nodes] == [("a", chat_pb2.NODE_STATE_LIVE, "f" * 32)]
    health = health_pb2_grpc.HealthStub(client.channel)
    for name in ("", "kvferry.v1.ChatService", "kvferry.v1.FleetService"):
        assert (
            await health.Check(health_pb2.HealthCheckRequest(service=name))
        ).status == health_pb2.HealthCheckResponse.SERVING
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo(iter([asked]))
    names = {s.name async for answer in answers for s in answer.list_services_response.service}
    assert {"kvferry.v1.ChatService", "kvferry.v1.FleetService", "grpc.health.v1.Health"} <= names


async def test_long_prompts_are_tokenised_off_the_event_loop(
    new_cluster: Callable[..., Any], model: LoadedModel
) -> None:
    threads: list[str] = []

    class Watched:
        """The real model, noting which thread tokenises."""

        def __getattr__(self, name: str) -> Any:
            return getattr(model.text, name)

        def first_turn(self, messages: Any, **settings: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return model.text.first_turn(messages, **settings)

    cluster = await new_cluster(model=LoadedModel(text=Watched(), context_length=8192))  # type: ignore[arg-type]
    client = cluster.client()
    assert (await refused(client.generate(await client.new_session(), "word " * 9000)))[0] == "prompt_too_long"
    assert threads
    assert threading.main_thread().name not in threads


async def test_bytes_that_are_no_message_are_the_callers_mistake(cluster: Cluster) -> None:
    channel = cluster.client().channel
    for service, method in (("ChatService", "GetStatus"), ("FleetService", "Register")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/kvferry.v1.{service}/{method}")(b"\xff" * 9)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert code_of(caught.value) == "invalid_request"


@pytest.mark.parametrize("looked_up", ["get_session", "list_placements", "list_turns", "session_and_turns"])
async def test_a_session_is_shown_and_exported_as_of_one_moment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, looked_up: str
) -> None:
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session_id = await client.new_session()
    real, answering = getattr(SqliteRegistry, looked_up), asyncio.Lock()

    async def look_and_be_overtaken(self: SqliteRegistry, session_id: str) -> Any:
        found = await real(self, session_id)
        if not answering.locked():  # the turn itself looks things up as well
            async with answering:
                await all_of(client.generate(session_id))
        return found

    monkeypatch.setattr(SqliteRegistry, looked_up, look_and_be_overtaken)
    got = await client.get(session_id)
    assert got.session.n_turns == len(got.turns)
    assert got.session.n_tokens == len(got.token_ids)
    assert all(turn.placements for turn in got.turns)
    exported = await client.stub.ExportSession(chat_pb2.ExportSessionRequest(session_id=session_id))
    assert exported.session.epoch == len(exported.session.turns)
