"""Several answers to the same messages, as one stream that outlives its connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

import grpc

from kvferry.client.errors import ClientError, Unavailable, map_rpc_error
from kvferry.client.sdk.connection import Connection
from kvferry.client.sdk.events import ConnectionLost, TurnEvent
from kvferry.client.sdk.filling import request_of
from kvferry.client.sdk.tracker import TurnTracker
from kvferry.client.sdk.turn import Answer, Collected, EventCall, outliving
from kvferry.client.sdk.turn_trace import TurnTrace
from kvferry.client.sdk.wire import event_of
from kvferry.proto.v1 import chat_pb2


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """What happened in one of the answers. ``session_id``: the one to go on in, if this is the answer to go on from.

    With ConnectionLost, which is all of theirs, ``sample`` is -1.
    """

    sample: int
    session_id: str
    event: TurnEvent


class AsyncSamples:
    """Iterate it for the events of all answers, once. Made by AsyncSession.samples and resume_samples; for the rest as
    AsyncTurn."""

    def __init__(
        self,
        connection: Connection,
        session_id: str,
        turn_id: str,
        n: int,
        request: chat_pb2.GenerateRequest | None = None,
    ) -> None:
        """With a `request` they are started, without it existing ones are resumed (empty `turn_id`: the latest)."""
        self.session_id = session_id
        self._connection = connection
        self._request = request
        self._trackers = [TurnTracker(turn_id) for _ in range(n)]
        self._events = self._follow()

    @property
    def turn_id(self) -> str:
        """Known from the start for new answers; for the session's latest once the first event has come."""
        return self._trackers[0].turn_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampleEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Closes the stream; the turns go on."""
        await self._events.aclose()

    async def cancel(self) -> None:
        """Ends all of them; each keeps the tokens that came."""
        request = request_of(chat_pb2.CancelTurnRequest, session_id=self.session_id, turn_id=self.turn_id)
        await self._connection.ask(self._connection.stub.CancelTurn, request)

    async def collect(self) -> list[Answer]:
        """Reads to the end; the answers in their order. Raises TurnFailed when one of them ended with an error."""
        collected = [Collected() for _ in self._trackers]
        sessions = [""] * len(self._trackers)
        async for sampled in self:
            if not isinstance(sampled.event, ConnectionLost):
                sessions[sampled.sample] = sampled.session_id
                collected[sampled.sample].take(sampled.event)
        return [one.answer(session, self.turn_id) for one, session in zip(collected, sessions, strict=True)]

    def _is_finished(self) -> bool:
        return all(tracker.finished for tracker in self._trackers)

    def _lost(self, failure: ClientError) -> SampleEvent:
        n_tokens = sum(tracker.next_index for tracker in self._trackers)
        return SampleEvent(-1, self.session_id, ConnectionLost(str(failure), n_tokens))

    async def _follow(self) -> AsyncGenerator[SampleEvent]:
        self._trace = TurnTrace(self.session_id, self.turn_id, self._request)
        whole = outliving(self._connection, self._is_finished, self._one_connection, self._lost)
        try:
            async with aclosing(whole) as events:
                async for one in events:
                    self._trace.note(one.event)
                    yield one
        finally:
            self._trace.end()

    async def _one_connection(self) -> AsyncGenerator[SampleEvent]:
        """Asked again, the request begins those that have not begun; what has begun is resumed."""
        request = None if all(tracker.started for tracker in self._trackers) else self._request
        call = self._resume() if request is None else self._generate(request)
        async with aclosing(self._read(call, repeats=request is not None)) as events:
            async for event in events:
                yield event

    def _generate(self, request: chat_pb2.GenerateRequest) -> EventCall:
        return self._connection.stub.Generate(request, metadata=self._trace.headers)

    def _resume(self) -> EventCall:
        return self._connection.stub.Resume(
            request_of(
                chat_pb2.ResumeRequest,
                session_id=self.session_id,
                turn_id=self.turn_id,
                from_indexes=[tracker.next_index for tracker in self._trackers],
            ),
            metadata=self._trace.headers,
        )

    async def _read(self, call: EventCall, *, repeats: bool) -> AsyncGenerator[SampleEvent]:
        """``repeats``: the coordinator tells all from the beginning, whatever has come."""
        try:
            async for message in call:
                tracker = self._trackers[message.sample]
                tracker.check_turn(message.event.turn_id)
                event = event_of(message.event)
                is_known = repeats and message.event.HasField("token") and message.event.sequence < tracker.next_index
                is_known |= tracker.finished  # one that had ended is told of again
                if event is not None and not is_known and tracker.accept(event):
                    yield SampleEvent(message.sample, message.event.session_id, event)
                if self._is_finished():
                    return
        except grpc.aio.AioRpcError as error:
            raise map_rpc_error(error, self._connection.address) from None
        finally:
            call.cancel()
        raise Unavailable(f"the coordinator at {self._connection.address} closed the stream before all had ended")
