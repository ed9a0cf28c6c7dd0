"""Several answers to one request: the same turn in a session and in forks of it, each with a seed of its own.

Number 0 is the session's own. Number i is the turn with the same id in the fork ``sample_session(...)``, drawn with
seed + i. So each is durable, placed, lost, moved, resumed and cancelled as every turn is, and none of that knows of
samples; what they share is the history, whose rows a node computes once for all that it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Final

from kvferry.coordinator.registry import SessionRecord, TurnRecord
from kvferry.proto.v1 import chat_pb2, common_pb2

Key = tuple[str, str]
"""(session_id, turn_id)"""

Events = AsyncGenerator[chat_pb2.TurnEvent, None]

MAX_NAME: Final = 64
"""Characters of the session's own name that its samples' names begin with."""


def sample_session(session_id: str, turn_id: str, number: int) -> str:
    """The session that sample ``number`` of a turn is in: a function of its arguments, so that anybody finds it."""
    if number == 0:
        return session_id
    digest = hashlib.sha256(f"{session_id}/{turn_id}".encode()).hexdigest()
    return f"{session_id[:MAX_NAME]}.{digest[:24]}.{number}"


def sample_keys(key: Key, n_samples: int) -> list[Key]:
    """All samples of a turn, itself first."""
    return [(sample_session(*key, number), key[1]) for number in range(n_samples)]


def sample_record(first: TurnRecord, number: int) -> TurnRecord:
    """The turn of sample ``number``, as it begins."""
    sampling = common_pb2.SamplingSettings.FromString(first.sampling)
    sampling.seed = (sampling.seed + number) % 2**64
    return dataclasses.replace(
        first,
        session_id=sample_session(first.session_id, first.turn_id, number),
        sampling=sampling.SerializeToString(deterministic=True),
        epoch=0,
        fingerprint="",
        outcome=None,
        n_samples=1,
    )


def sample_fork(session: SessionRecord, turn: TurnRecord) -> SessionRecord:
    """The fork that a sample's turn begins in; the registry fills in what it takes over from its parent."""
    return SessionRecord(
        session_id=turn.session_id,
        model=session.model,
        tokenizer_digest=session.tokenizer_digest,
        created_at_ms=turn.created_at_ms,
        updated_at_ms=turn.created_at_ms,
    )


def n_kept_before(turns: Iterable[TurnRecord], turn_id: str) -> int:
    """How many kept turns a session, which has these, had when the turn began."""
    before = itertools.takewhile(lambda turn: turn.turn_id != turn_id, turns)
    return sum(turn.outcome is not None and turn.outcome.kept for turn in before)


async def merged(streams: Sequence[Events]) -> AsyncGenerator[tuple[int, chat_pb2.TurnEvent], None]:
    """(number of the stream, event) as they come; a slow reader holds back all, and holds one event of each.

    Ends when all have ended. Raises what the first of them to fail raised. Closes them all.
    """
    # None: the stream has ended.
    queue: asyncio.Queue[tuple[int, chat_pb2.TurnEvent | Exception | None]] = asyncio.Queue(1)

    async def pump(number: int, stream: Events) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for event in stream:
                    await queue.put((number, event))
        except Exception as error:  # noqa: BLE001 - it is raised where the events are read
            await queue.put((number, error))
        else:
            await queue.put((number, None))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        n_open = len(streams)
        while n_open:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_open -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
