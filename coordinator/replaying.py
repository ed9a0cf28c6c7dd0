"""The events of turns that are over, made again of what the registry keeps."""

from __future__ import annotations

import asyncio
from typing import Final

from kvferry.coordinator.conversation import ModelAnswerText
from kvferry.coordinator.models import ServedModel
from kvferry.coordinator.reading import check_index, is_whole, stopping
from kvferry.coordinator.registry import Registry, TurnRecord
from kvferry.coordinator.surroundings import InThread
from kvferry.coordinator.turn_events import replay
from kvferry.proto.v1 import chat_pb2

MAX_REPLAYS: Final = 8
"""At once; each detokenises its whole answer in a thread."""


class Replays:
    """One per coordinator; event loop only."""

    def __init__(self, registry: Registry, in_thread: InThread) -> None:
        self._registry = registry
        self._in_thread = in_thread
        self._slots = asyncio.Semaphore(MAX_REPLAYS)

    async def events(self, record: TurnRecord, model: ServedModel, from_index: int) -> list[chat_pb2.TurnEvent]:
        """All of them, but tokens only from ``from_index`` on. ``record``: as of a moment ago.

        Raises UnknownSession, UnknownTurn, IndexOutOfRange, and Stopping for a turn that is open all the same.
        """
        registry = self._registry
        if record.outcome is None:  # it ended since it was looked up, or the coordinator let go of it
            record = await registry.get_turn(record.session_id, record.turn_id)
        if record.outcome is None:
            raise stopping()
        check_index(
            from_index, len(record.outcome.answer_ids) if is_whole(record.outcome.reason) else record.max_tokens
        )
        placements = (await registry.list_placements(record.session_id)).get(record.turn_id, [])
        text = ModelAnswerText(model.text, record.stop)
        async with self._slots:
            events = await self._in_thread(lambda: replay(record, map(chat_pb2.Placement.FromString, placements), text))
        return [e for e in events if not e.HasField("token") or e.sequence >= from_index]
