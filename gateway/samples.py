"""One request's answers: each a turn in a session of its own, so that a connection that breaks loses nothing.

The sessions have names made of the request's id, so any gateway finds them again. What their prompts have in common
with each other, or with earlier requests, is found by the router token by token: nobody names a session.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvferry.client import AnswerForm, AsyncClient, AsyncTurn, Message, Sampling, TurnEvent

T = TypeVar("T")

SampleEvent = tuple[int, TurnEvent]
"""Which answer, and what happened in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOrder:
    """What each of a request's answers is asked for."""

    messages: Sequence[Message]
    sampling: Sampling
    max_tokens: int
    stop: Sequence[str]
    form: AnswerForm


def session_of(request_id: str, sample: int) -> str:
    """The name of the session that holds an answer."""
    return f"{request_id}.{sample}"


async def start_samples(client: AsyncClient, request_id: str, model: str, order: TurnOrder, n: int) -> list[AsyncTurn]:
    """Sessions for n answers; answer i has the seed of the request plus i. Their turns start when they are read."""
    turns = []
    for sample in range(n):
        session = await client.create_session(session_of(request_id, sample), model=model)
        sampling = dataclasses.replace(order.sampling, seed=((order.sampling.seed or 0) + sample) % 2**64)
        turns.append(
            session.generate(
                order.messages,
                sampling=sampling,
                max_tokens=order.max_tokens,
                stop=order.stop,
                form=order.form,
            )
        )
    return turns


def resume_samples(client: AsyncClient, request_id: str, n: int) -> list[AsyncTurn]:
    """The same answers again, from their first tokens on: what a reader has seen, he drops."""
    return [client.session(session_of(request_id, sample)).resume() for sample in range(n)]


async def merged(turns: Sequence[AsyncTurn]) -> AsyncGenerator[SampleEvent]:
    """The events of all answers as they come. Raises what any of them raises."""
    if len(turns) == 1:
        async with turns[0] as turn:
            async for event in turn:
                yield 0, event
        return
    queue: asyncio.Queue[SampleEvent | Exception | None] = asyncio.Queue(maxsize=len(turns))
    readers = [asyncio.create_task(_read(sample, turn, queue)) for sample, turn in enumerate(turns)]
    n_open = len(readers)
    try:
        while n_open:
            item = await queue.get()
            if item is None:
                n_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(sample: int, turn: AsyncTurn, queue: asyncio.Queue[SampleEvent | Exception | None]) -> None:
    try:
        async with turn:
            async for event in turn:
                await queue.put((sample, event))
    except Exception as error:  # noqa: BLE001 - handed on, not swallowed
        await queue.put(error)
    else:
        await queue.put(None)


async def with_pauses(events: AsyncIterator[T], seconds: float) -> AsyncGenerator[T | None]:
    """The same, and None whenever nothing came for so long."""
    waiting = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=seconds)
            if not done:
                yield None
                continue
            item = waiting.result()
            if item is None:
                return
            waiting = asyncio.ensure_future(anext(events, None))
            yield item
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
