from __future__ import annotations

import asyncio

import pytest

from kvferry.engine.sampling import SampledToken
from kvferry.node import turns
from kvferry.node.errors import SlowClient
from kvferry.node.turns import Failed, Finished, Outbox, Prefix, Token

PREFIX = Prefix(
    n_tokens=3, n_resident=1, n_restored=0, n_computed=2, queue_seconds=0, restore_seconds=0, prefill_seconds=0
)


def token(index: int) -> Token:
    return Token(index, SampledToken(index))


async def test_events_come_in_order_and_together_when_they_waited_together() -> None:
    outbox = Outbox()
    for event in (PREFIX, token(0), token(1)):
        outbox.put(event)
    assert await outbox.take() == [PREFIX, token(0), token(1)]
    outbox.put(Finished("end"))
    assert await outbox.take() == [Finished("end")]


async def test_a_reader_waits_for_the_next_event() -> None:
    outbox = Outbox()
    reading = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not reading.done()
    outbox.put(token(0))
    assert await reading == [token(0)]


async def test_a_message_is_bounded_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TOKENS_PER_MESSAGE", 2)
    outbox = Outbox()
    for index in range(5):
        outbox.put(token(index))
    taken = [await outbox.take() for _ in range(3)]
    assert taken == [[token(0), token(1)], [token(2), token(3)], [token(4)]]


async def test_after_the_end_nothing_is_added() -> None:
    outbox = Outbox()
    outbox.put(Finished("length"))
    outbox.put(token(7))
    assert await outbox.take() == [Finished("length")]


async def test_a_reader_that_does_not_read_loses_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING_TOKENS", 3)
    outbox = Outbox()
    for index in range(3):
        outbox.put(token(index))
    with pytest.raises(SlowClient):
        outbox.put(token(3))
    (event,) = await outbox.take()
    assert isinstance(event, Failed)
    assert isinstance(event.error, SlowClient)


async def test_reading_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING_TOKENS", 2)
    outbox = Outbox()
    for index in range(10):
        outbox.put(token(index))
        assert await outbox.take() == [token(index)]
