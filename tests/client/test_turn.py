"""A turn outlives its connection: every way to lose it, over real gRPC."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.client.errors import InvalidFormat, InvalidSampling, InvalidTools, NoNode, UnknownTurn
from kvferry.client.sdk import (
    AnswerForm,
    AsyncClient,
    BrokenSequence,
    Choices,
    ConnectionLost,
    Finished,
    FinishReason,
    JsonObject,
    JsonSchema,
    NodeLost,
    ParsedAnswer,
    Placed,
    Started,
    Token,
    Tool,
    ToolCall,
    TurnFailed,
    Unavailable,
)
from kvferry.client.sdk.values import Message, Sampling
from kvferry.proto.v1 import chat_pb2, common_pb2

from .scripted_coordinator import (
    TURN,
    Break,
    Hang,
    Refuse,
    ScriptedCoordinator,
    finished,
    node_lost,
    parts,
    placed,
    started,
    token,
    tokens,
)


def client_of(coordinator: ScriptedCoordinator, patience_s: float = 10.0) -> AsyncClient:
    return AsyncClient(f"127.0.0.1:{coordinator.port}", patience_s=patience_s, new_id=lambda: TURN)


async def events_of(coordinator: ScriptedCoordinator, patience_s: float = 10.0) -> list:
    async with client_of(coordinator, patience_s) as client:
        return [event async for event in client.session("s").generate("hello")]


def token_ids(events: list) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token)]


async def test_an_undisturbed_turn_arrives_as_it_was_sent(coordinator):
    coordinator.scripts = [
        [started(), placed("n1", 1), *tokens(0, 2), node_lost("n1", 2), placed("n2", 2, 2), token(2), finished(3)]
    ]
    events = await events_of(coordinator)
    assert [type(e) for e in events] == [Started, Placed, Token, Token, NodeLost, Placed, Token, Finished]
    assert events[0] == Started(7, 3)
    assert (events[1].node_id, events[1].prefix.n_resident, events[1].candidates[0].reason) == ("n1", 3, "the only one")
    assert events[2] == Token(0, 100, "w0 ", content="w0 ", token_bytes=b"w0 ")
    assert events[4].n_tokens == 2
    assert events[-1].reason is FinishReason.END


async def test_the_request_carries_all_that_was_asked_for(coordinator):
    coordinator.scripts = [[finished(0)]]
    messages = [Message("system", "be brief"), Message("user", "hello")]
    sampling = Sampling(temperature=0.5, top_k=3, seed=2**40)
    async with client_of(coordinator) as client:
        await client.session("s").generate(messages, sampling=sampling, max_tokens=9, stop=["x"]).collect()
    assert coordinator.calls == [
        chat_pb2.GenerateRequest(
            session_id="s",
            turn_id=TURN,
            messages=[chat_pb2.ChatMessage(role=m.role, content=m.content) for m in messages],
            sampling=common_pb2.SamplingSettings(temperature=0.5, top_k=3, seed=2**40),
            max_tokens=9,
            stop=["x"],
        )
    ]


async def test_tools_thinking_and_the_form_of_the_answer_travel(coordinator):
    coordinator.scripts = [[finished(0)]] * 4
    tool = Tool("f", "does", {"type": "object"})
    call = ToolCall("f", {"ä": 1}, "id")
    async with client_of(coordinator) as client:
        session = client.session("s")
        await session.generate("hi", tools=[tool], must_call="f", thinking=False, temperature=1.0).collect()
        form = AnswerForm(format=JsonSchema({"type": "object"}), thinking=True)
        history = [
            Message("assistant", "", reasoning="hm", tool_calls=(call,)),
            Message("tool", "25", tool_call_id="id"),
        ]
        await session.generate(history, form=form).collect()
        await session.generate("hi", form=form, format=Choices(["a", "b"]), must_call=True).collect()
        await session.generate("hi", format=JsonObject()).collect()
        with pytest.raises(InvalidFormat, match="cannot be written as JSON"):
            session.generate("hi", format=JsonSchema({"a": {1, 2}}))
        with pytest.raises(InvalidTools, match="half of a surrogate pair"):
            session.generate("hi", tools=[Tool("f", "\ud800")])
    first, second, third, fourth = coordinator.calls
    assert list(first.tools) == [chat_pb2.Tool(name="f", description="does", parameters='{"type": "object"}')]
    assert (first.tool_choice, first.tool_name) == (chat_pb2.TOOL_CHOICE_REQUIRED, "f")
    assert (first.HasField("thinking"), first.thinking, first.sampling.temperature) == (True, False, 1.0)
    assert not first.HasField("format")
    assert second.messages[0] == chat_pb2.ChatMessage(
        role="assistant", reasoning="hm", tool_calls=[chat_pb2.ToolCall(id="id", name="f", arguments='{"ä": 1}')]
    )
    assert second.messages[1] == chat_pb2.ChatMessage(role="tool", content="25", tool_call_id="id")
    assert (second.thinking, second.format.json_schema, second.tool_choice) == (True, '{"type": "object"}', 0)
    assert list(third.format.choices.texts) == ["a", "b"]
    assert (third.tool_choice, third.tool_name) == (chat_pb2.TOOL_CHOICE_REQUIRED, "")
    assert fourth.format.json_object
    assert not fourth.HasField("thinking")


async def test_an_answer_comes_in_parts(coordinator):
    call = chat_pb2.ToolCall(id="turn-1.0", name="f", arguments='{"x": [1]}')
    answer = chat_pb2.ParsedAnswer(reasoning="Hm.", content="Well!", tool_calls=[call], malformed_calls=["{"])
    coordinator.scripts = [[
        started(), placed("n1", 1),
        parts(0, "<think>"),
        parts(1, "Hm.</think>\n\nW", chat_pb2.AnswerPart(reasoning="Hm."), chat_pb2.AnswerPart(content="W")),
        parts(2, "ell<tool_call>...", chat_pb2.AnswerPart(content="ell"), chat_pb2.AnswerPart(tool_call=call)),
        finished(3, answer=answer),
    ]]  # fmt: skip
    events = await events_of(coordinator)
    made = ToolCall("f", {"x": [1]}, "turn-1.0")
    assert [(e.content, e.reasoning, e.tool_calls) for e in events[2:5]] == [
        ("", "", ()), ("W", "Hm.", ()), ("ell", "", (made,)),
    ]  # fmt: skip
    assert events[-1].tail_content == "!"
    assert events[-1].answer == ParsedAnswer("Well!", "Hm.", (made,), ("{",))


async def test_a_broken_stream_is_resumed_from_the_first_token_that_is_missing(coordinator):
    coordinator.scripts = [
        [started(), placed("n1", 1), *tokens(0, 3), Break()],
        [started(), placed("n1", 1), placed("n2", 2, 3), *tokens(3, 5), Break()],
        [started(), token(5), finished(6)],
    ]
    events = await events_of(coordinator)
    assert token_ids(events) == [100, 101, 102, 103, 104, 105]
    assert [call.from_index for call in coordinator.calls[1:]] == [3, 5]
    assert all(call.turn_id == TURN and call.session_id == "s" for call in coordinator.calls)


async def test_what_the_coordinator_repeats_reaches_the_program_once(coordinator):
    coordinator.scripts = [
        [started(), placed("n1", 1), token(0), Break()],
        [started(), placed("n1", 1), token(1), finished(2)],
    ]
    kinds = [type(e) for e in await events_of(coordinator)]
    assert kinds == [Started, Placed, Token, ConnectionLost, Token, Finished]


async def test_a_turn_that_was_never_acknowledged_is_asked_for_again_under_the_same_name(coordinator):
    coordinator.scripts = [[Break()], [started(), token(0), finished(1)]]
    assert token_ids(await events_of(coordinator)) == [100]
    assert [type(call) for call in coordinator.calls] == [chat_pb2.GenerateRequest] * 2
    assert {call.turn_id for call in coordinator.calls} == {TURN}


async def test_a_turn_whose_acknowledgement_was_lost_is_resumed(coordinator):
    coordinator.scripts = [[Break()], [Refuse("turn_exists")], [started(), token(0), finished(1)]]
    assert token_ids(await events_of(coordinator)) == [100]
    assert [type(call) for call in coordinator.calls][2] is chat_pb2.ResumeRequest


async def test_the_coordinator_may_restart_on_its_port(coordinator):
    coordinator.scripts = [[started(), token(0), Hang()], [started(), token(1), finished(2)]]
    async with client_of(coordinator) as client:
        turn = client.session("s").generate("hello")
        seen = [await anext(turn), await anext(turn)]
        await coordinator.stop()
        waiting = asyncio.ensure_future(anext(turn))
        await asyncio.sleep(0.3)
        await coordinator.start()
        seen.append(await waiting)
        seen += [event async for event in turn]
    assert token_ids(seen) == [100, 101]
    assert any(isinstance(event, ConnectionLost) and event.n_tokens == 1 for event in seen)


async def test_a_stream_that_just_ends_is_resumed(coordinator):
    coordinator.scripts = [[started(), token(0)], [token(1), finished(2)]]
    assert token_ids(await events_of(coordinator)) == [100, 101]


async def test_a_retry_hint_is_waited_for(coordinator):
    coordinator.scripts = [[Refuse("no_node", retry_after_ms=400)], [started(), token(0), finished(1)]]
    before = asyncio.get_running_loop().time()
    assert token_ids(await events_of(coordinator)) == [100]
    assert asyncio.get_running_loop().time() - before >= 0.4


async def test_patience_ends_with_the_error_of_the_last_try(coordinator):
    coordinator.scripts = [[started(), Refuse("no_node", 50)]] * 100
    with pytest.raises(NoNode, match="Refused with no_node") as caught:
        await events_of(coordinator, patience_s=0.5)
    assert caught.value.retry_after_s == 0.05
    assert len(coordinator.calls) > 2


async def test_no_patience_means_one_try(coordinator):
    coordinator.scripts = [[started(), Refuse("no_node", 50)]]
    with pytest.raises(NoNode):
        await events_of(coordinator, patience_s=0)
    assert len(coordinator.calls) == 1


async def test_a_coordinator_that_is_not_there_is_named():
    async with AsyncClient("127.0.0.1:1", patience_s=0) as client:
        with pytest.raises(Unavailable, match=r"cannot reach the coordinator at 127.0.0.1:1 .*refused"):
            await client.session("s").generate("hello").collect()


@pytest.mark.parametrize(
    ("script", "expected", "received"),
    [
        pytest.param([started(), token(0), token(2)], 1, 2, id="lost"),
        pytest.param([started(), token(0), token(0)], 1, 0, id="duplicated"),
        pytest.param([started(), token(0), finished(2)], 1, 2, id="lost-before-the-end"),
        pytest.param([started(), token(0), token(1), finished(1)], 2, 1, id="too-many"),
        pytest.param([started(), token(0, turn_id="other")], 0, 0, id="foreign"),
    ],
)
async def test_a_stream_that_breaks_its_promise_is_refused(coordinator, script, expected, received):
    coordinator.scripts = [script]
    with pytest.raises(BrokenSequence) as caught:
        await events_of(coordinator)
    assert (caught.value.expected, caught.value.received) == (expected, received)


async def test_a_coordinator_that_ignores_from_index_is_found_out(coordinator):
    coordinator.scripts = [[started(), *tokens(0, 3), Break()], [started(), *tokens(0, 3), finished(3)]]
    with pytest.raises(BrokenSequence, match=r"token 0 .* came twice"):
        await events_of(coordinator)


async def test_what_cannot_be_is_not_asked_twice(coordinator):
    coordinator.scripts = [[Refuse("invalid_sampling")]]
    with pytest.raises(InvalidSampling):
        await events_of(coordinator)
    assert len(coordinator.calls) == 1


async def test_a_turn_that_is_gone_after_an_outage_ends_with_that_error(coordinator):
    coordinator.scripts = [[started(), token(0), Break()], [Refuse("unknown_turn")]]
    with pytest.raises(UnknownTurn):
        await events_of(coordinator)


async def test_a_failed_turn_is_an_event_and_collect_raises(coordinator):
    failure = finished(1, reason=common_pb2.FINISH_REASON_ERROR, error_code="out_of_kv_memory", error="No room.")
    coordinator.scripts = [[started(), token(0), failure], [started(), token(0), failure]]
    assert (await events_of(coordinator))[-1].reason is FinishReason.ERROR
    async with client_of(coordinator) as client:
        with pytest.raises(TurnFailed, match=r"No room\.") as caught:
            await client.session("s").generate("hello").collect()
    assert caught.value.turn_code == "out_of_kv_memory"


async def test_collect_gives_the_whole_answer(coordinator):
    coordinator.scripts = [[started(), *tokens(0, 2), finished(2)]]
    async with client_of(coordinator) as client:
        answer = await client.session("s").generate("hello").collect()
    assert (answer.text, answer.token_ids, answer.turn_id) == ("w0 w1 !", (100, 101), TURN)


async def test_leaving_the_loop_closes_the_stream_and_not_the_turn(coordinator):
    coordinator.scripts = [[started(), token(0), Hang()]]
    async with client_of(coordinator) as client:
        async with client.session("s").generate("hello") as turn:
            async for event in turn:
                if isinstance(event, Token):
                    break
        await until(lambda: coordinator.n_streams_open == 0)
    assert [type(call) for call in coordinator.calls] == [chat_pb2.GenerateRequest]


async def test_a_cancelled_reader_closes_the_stream(coordinator):
    coordinator.scripts = [[started(), Hang()]]
    async with client_of(coordinator) as client:
        reading = asyncio.ensure_future(client.session("s").generate("hello").collect())
        await until(lambda: coordinator.n_streams_open == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: coordinator.n_streams_open == 0)


async def test_cancel_names_the_turn(coordinator):
    coordinator.scripts = [[started(), finished(0, reason=common_pb2.FINISH_REASON_CANCELLED)]]
    async with client_of(coordinator) as client:
        turn = client.session("s").generate("hello")
        await turn.cancel()
        assert [type(e) async for e in turn] == [Started, Finished]
    assert coordinator.calls[0] == chat_pb2.CancelTurnRequest(session_id="s", turn_id=TURN)


async def test_the_latest_turn_can_be_read_without_knowing_its_name(coordinator):
    coordinator.scripts = [[started(), token(4), Break()], [started(), finished(5)]]
    async with client_of(coordinator) as client:
        turn = client.session("s").resume(from_index=4)
        events = [event async for event in turn]
    assert token_ids(events) == [104]
    assert [(c.turn_id, c.from_index) for c in coordinator.calls] == [("", 4), (TURN, 5)]
    assert turn.turn_id == TURN


async def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true within twenty seconds")
