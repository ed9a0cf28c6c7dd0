"""A client that knows several coordinators: what one of them cannot do, it asks of the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from kvferry.client.errors import InvalidAddress, Unavailable
from kvferry.client.sdk import AsyncClient, ConnectionLost, Finished, Started, Token
from kvferry.proto.v1 import chat_pb2

from .scripted_coordinator import TURN, Break, Refuse, ScriptedCoordinator, finished, placed, started, token, tokens


@pytest.fixture
async def another() -> AsyncIterator[ScriptedCoordinator]:
    scripted = ScriptedCoordinator()
    await scripted.start()
    yield scripted
    await scripted.stop()


def client_of(*coordinators: ScriptedCoordinator, patience_s: float = 10.0) -> AsyncClient:
    addresses = ",".join(f"127.0.0.1:{coordinator.port}" for coordinator in coordinators)
    return AsyncClient(addresses, patience_s=patience_s, new_id=lambda: TURN)


async def test_a_stream_goes_on_at_the_next_coordinator_from_the_token_it_lacks(coordinator, another) -> None:
    coordinator.scripts = [[started(), placed("n1", 1), *tokens(0, 3), Break()]]
    another.scripts = [[started(), placed("n1", 1), placed("n2", 2, 3), *tokens(3, 5), finished(5)]]
    async with client_of(coordinator, another) as client:
        events = [event async for event in client.session("s").generate("hello")]
    assert [e.sequence for e in events if isinstance(e, Token)] == [0, 1, 2, 3, 4]
    assert sum(isinstance(e, Started) for e in events) == 1
    assert sum(isinstance(e, ConnectionLost) for e in events) == 1
    assert isinstance(events[-1], Finished)
    assert another.calls == [chat_pb2.ResumeRequest(session_id="s", turn_id=TURN, from_index=3)]


async def test_a_turn_that_one_could_not_begin_is_begun_at_the_next_with_the_same_name(coordinator, another) -> None:
    coordinator.scripts = [[Refuse("registry_unavailable", 10)]]
    another.scripts = [[started(), token(0), finished(1)]]
    async with client_of(coordinator, another) as client:
        answer = await client.session("s").generate("hello").collect()
    assert answer.token_ids == (100,)
    assert [call.turn_id for call in (*coordinator.calls, *another.calls)] == [TURN, TURN]


async def test_a_short_call_goes_to_the_next_and_stays_there(coordinator, another) -> None:
    await coordinator.stop()
    async with client_of(coordinator, another) as client:
        for name in "abc":
            await client.create_session(name)
        assert client.address == f"127.0.0.1:{another.port}"


async def test_when_all_are_away_the_error_comes_after_patience(coordinator, another) -> None:
    await coordinator.stop()
    await another.stop()
    async with client_of(coordinator, another, patience_s=0.3) as client:
        with pytest.raises(Unavailable):
            await client.status()


@pytest.mark.parametrize("addresses", ["a:1,", "a:1,b", ",a:1", "a:1,b:99999"])
def test_each_address_is_checked(addresses: str) -> None:
    with pytest.raises(InvalidAddress):
        AsyncClient(addresses)


class DyingCoordinator(ScriptedCoordinator):
    """Lets two calls come, then breaks both, as often as two come."""

    def __init__(self) -> None:
        super().__init__()
        self._both = asyncio.Barrier(2)

    async def _short_call(self, request, context) -> None:
        self.calls.append(request)
        await self._break(context)

    async def _play(self, request, context) -> AsyncIterator[chat_pb2.TurnEvent]:
        await self._break(context)
        yield chat_pb2.TurnEvent()

    async def _break(self, context) -> None:
        await self._both.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@pytest.fixture
async def dying() -> AsyncIterator[DyingCoordinator]:
    scripted = DyingCoordinator()
    await scripted.start()
    yield scripted
    await scripted.stop()


async def test_of_several_short_calls_that_one_breaks_at_once_each_goes_to_the_next(dying, another) -> None:
    async with client_of(dying, another) as client:
        await asyncio.gather(client.create_session("a"), client.create_session("b"))
    assert sorted(another.sessions) == ["a", "b"]
    assert len(dying.calls) == 2


async def test_of_several_streams_that_one_breaks_at_once_each_goes_to_the_next(dying, another) -> None:
    another.scripts = [[started(), token(0), finished(1)] for _ in range(2)]
    async with client_of(dying, another) as client:
        answers = await asyncio.gather(*(client.session(name).generate("hello").collect() for name in "ab"))
    assert [answer.token_ids for answer in answers] == [(100,), (100,)]
    assert len(dying.calls) == 2
