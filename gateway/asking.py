"""One request's answers: turns in sessions of its own, so that a connection that breaks loses nothing.

The sessions have names made of the request's id, so any gateway finds them again. What their prompts have in common
with each other, or with earlier requests, is found by the router token by token: nobody names a session. Nobody will
ask for them later either, so they say themselves when they may be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvferry.client import (
    AnswerForm,
    AsyncClient,
    AsyncSamples,
    AsyncSession,
    ClientError,
    Message,
    NotFound,
    RawPrompt,
    Sampling,
    TurnEvent,
)

AnswerEvent = tuple[int, TurnEvent]
"""Which answer, and what happened in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a request asks: `n` answers to each of the prompts. Answer number `n * prompt + i` has the seed plus `i`."""

    prompts: Sequence[Sequence[Message] | RawPrompt]
    n: int
    model: str
    sampling: Sampling
    max_tokens: int
    stop: Sequence[str]
    form: AnswerForm = field(default_factory=AnswerForm)

    @property
    def n_answers(self) -> int:
        """Of all prompts."""
        return self.n * len(self.prompts)


def session_of(request_id: str, prompt: int) -> str:
    """The name of the session that holds a prompt's answers; the SDK names those of the others."""
    return f"{request_id}.{prompt}"


async def start(client: AsyncClient, request_id: str, order: Order, expires_after_s: int) -> list[AsyncSamples]:
    """A stream for each prompt. The turns start when they are read."""
    streams = []
    for number, prompt in enumerate(order.prompts):
        session = await client.create_session(
            session_of(request_id, number), model=order.model, expires_after_s=expires_after_s
        )
        streams.append(
            session.samples(
                prompt,
                order.n,
                sampling=order.sampling,
                max_tokens=order.max_tokens,
                stop=order.stop,
                form=order.form,
            )
        )
    return streams


async def cancel(client: AsyncClient, request_id: str, order: Order) -> None:
    """End all its answers, which keep what they have. Raises ClientError, NotFound while one has not begun."""
    await _of_each(client, request_id, order, lambda session: session.cancel())


async def forget(client: AsyncClient, request_id: str, order: Order) -> None:
    """Leave nothing of a request that was refused or failed, whatever of it had begun. Raises ClientError."""
    if order.n > 1:
        with contextlib.suppress(ClientError):  # those of one prompt are in other sessions
            await cancel(client, request_id, order)
    await _of_each(client, request_id, order, lambda session: session.delete())


async def _of_each(
    client: AsyncClient, request_id: str, order: Order, do: Callable[[AsyncSession], Awaitable[None]]
) -> None:
    """For the session of each prompt, also when it fails for another one.

    Raises the first ClientError; NotFound only where there is no other: a session that is gone needs no more of us,
    one that is busy does.
    """
    sessions = (client.session(session_of(request_id, number)) for number in range(len(order.prompts)))
    results = await asyncio.gather(*map(do, sessions), return_exceptions=True)
    for error in sorted(filter(None, results), key=lambda result: isinstance(result, NotFound)):
        raise error


def resume(client: AsyncClient, request_id: str, order: Order) -> list[AsyncSamples]:
    """The same answers again, from their first tokens on: what a reader has seen, he drops."""
    return [
        client.session(session_of(request_id, number)).resume_samples(order.n) for number in range(len(order.prompts))
    ]


async def events_of(streams: Sequence[AsyncSamples], n: int) -> AsyncGenerator[AnswerEvent]:
    """The events of all answers as they come, those of a connection aside. Raises what any of them raises."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as samples:
            async for one in samples:
                if one.sample >= 0:
                    yield one.sample, one.event
        return
    # None: a stream has ended. As many as there are streams: a slow reader holds them all back.
    queue: asyncio.Queue[AnswerEvent | Exception | None] = asyncio.Queue(maxsize=len(streams))
    readers = [asyncio.create_task(_read(number * n, stream, queue)) for number, stream in enumerate(streams)]
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


async def _read(first: int, stream: AsyncSamples, queue: asyncio.Queue[AnswerEvent | Exception | None]) -> None:
    try:
        async with aclosing(stream) as samples:
            async for one in samples:
                if one.sample >= 0:
                    await queue.put((first + one.sample, one.event))
    except Exception as error:  # noqa: BLE001 - handed on, not swallowed
        await queue.put(error)
    else:
        await queue.put(None)
