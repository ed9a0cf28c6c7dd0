"""One turn as a stream of events that outlives its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import grpc

from kvferry.client.errors import ClientError, TurnExists, TurnFailed, Unavailable, map_rpc_error
from kvferry.client.sdk.connection import Connection
from kvferry.client.sdk.events import ConnectionLost, Finished, FinishReason, Token, TurnEvent
from kvferry.client.sdk.filling import request_of
from kvferry.client.sdk.forms import ParsedAnswer
from kvferry.client.sdk.retry import Outage, backoff_of
from kvferry.client.sdk.tracker import TurnTracker
from kvferry.client.sdk.turn_trace import TurnTrace
from kvferry.client.sdk.wire import event_of
from kvferry.proto.v1 import chat_pb2

T = TypeVar("T")

EventCall = (
    grpc.aio.UnaryStreamCall[chat_pb2.GenerateRequest, chat_pb2.GenerateResponse]
    | grpc.aio.UnaryStreamCall[chat_pb2.ResumeRequest, chat_pb2.ResumeResponse]
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole turn."""

    turn_id: str
    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    session_id: str = ""

    @property
    def parsed(self) -> ParsedAnswer:
        """The answer in parts."""
        return self.finished.answer or ParsedAnswer(self.text)


@dataclass(slots=True)
class Collected:
    """What has come of an answer."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None

    def take(self, event: TurnEvent) -> None:
        """The next one. Raises TurnFailed when the turn ended with an error."""
        if isinstance(event, Token):
            self.token_ids.append(event.token_id)
            self.parts.append(event.text)
        elif isinstance(event, Finished):
            if event.reason is FinishReason.ERROR:
                raise TurnFailed(event.error or "the turn failed", turn_code=event.error_code)
            self.finished = event

    def answer(self, session_id: str, turn_id: str) -> Answer:
        """All of it, when the stream has ended."""
        assert self.finished is not None, "a stream ends with Finished or raises"  # noqa: S101 - for mypy
        text = "".join(self.parts) + self.finished.tail_text
        return Answer(turn_id, text, tuple(self.token_ids), self.finished, session_id)


async def outliving(
    connection: Connection,
    is_finished: Callable[[], bool],
    one_connection: Callable[[], AsyncGenerator[T]],
    lost: Callable[[ClientError], T],
) -> AsyncGenerator[T]:
    """Events over one connection after the other, until it is finished.

    One outage after the other; one that follows news starts with the whole patience. Each goes to the next coordinator,
    where there are several.
    """
    outage = Outage(connection.patience)
    while not is_finished():
        had_news, asked = False, connection.address
        try:
            async with aclosing(one_connection()) as events:
                async for event in events:
                    had_news = True
                    yield event
            continue
        except ClientError as error:
            if backoff_of(error) is False or connection.patience.total_s <= 0:
                raise
            failure = error
        yield lost(failure)
        connection.failed(asked)
        if had_news:
            outage = Outage(connection.patience)
        else:
            await asyncio.sleep(outage.delay_after(failure))


class AsyncTurn:
    """Iterate it for the events of a turn, once. Made by AsyncSession.generate and AsyncSession.resume.

    After UNAVAILABLE it asks again by itself, from the first token it lacks, for as long as the client's patience
    allows without any news; whatever comes is checked to be gapless and free of repetitions. Leaving the loop early
    closes the stream, not the turn: that goes on, and can be resumed or cancelled. Belongs to the event loop that
    iterates it.

    Raises BrokenSequence, and the ClientError of whatever the coordinator refuses. A turn that fails on the way does
    not raise: it ends with Finished(reason=ERROR); `collect` turns that into TurnFailed.
    """

    def __init__(
        self,
        connection: Connection,
        session_id: str,
        turn_id: str,
        request: chat_pb2.GenerateRequest | None = None,
        first_index: int = 0,
    ) -> None:
        """With a `request` the turn is started, without it an existing one is resumed (empty `turn_id`: the latest)."""
        self.session_id = session_id
        self._connection = connection
        self._request = request
        self._tracker = TurnTracker(turn_id, first_index)
        self._events = self._follow()

    @property
    def turn_id(self) -> str:
        """Known from the start for a new turn; for the session's latest turn once the first event has come."""
        return self._tracker.turn_id

    @property
    def next_index(self) -> int:
        """Index of the token that is due: where to resume."""
        return self._tracker.next_index

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TurnEvent:
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the stream; the turn goes on."""
        await self._events.aclose()

    async def cancel(self) -> None:
        """Ends the turn; the stream then finishes with reason CANCELLED and keeps the tokens that came."""
        request = request_of(chat_pb2.CancelTurnRequest, session_id=self.session_id, turn_id=self.turn_id)
        await self._connection.ask(self._connection.stub.CancelTurn, request)

    async def collect(self, on_event: Callable[[TurnEvent], None] | None = None) -> Answer:
        """Reads to the end. Raises TurnFailed when the turn ended with an error."""
        collected = Collected()
        async for event in self:
            if on_event is not None:
                on_event(event)
            collected.take(event)
        return collected.answer(self.session_id, self.turn_id)

    async def _follow(self) -> AsyncGenerator[TurnEvent]:
        def lost(failure: ClientError) -> ConnectionLost:
            return ConnectionLost(str(failure), self._tracker.next_index)

        self._trace = TurnTrace(self.session_id, self.turn_id, self._request)
        whole = outliving(self._connection, lambda: self._tracker.finished, self._one_connection, lost)
        try:
            async with aclosing(whole) as events:
                async for event in events:
                    self._trace.note(event)
                    yield event
        finally:
            self._trace.end()

    async def _one_connection(self) -> AsyncGenerator[TurnEvent]:
        is_new = self._request is not None and not self._tracker.started
        try:
            async with aclosing(self._read(self._generate() if is_new else self._resume())) as events:
                async for event in events:
                    yield event
        except TurnExists:
            if not is_new:
                raise
            self._tracker.started = True  # an earlier try had reached the coordinator, only its reply was lost
            async with aclosing(self._read(self._resume())) as events:
                async for event in events:
                    yield event

    def _generate(self) -> EventCall:
        assert self._request is not None  # noqa: S101 - for mypy; _one_connection asked
        return self._connection.stub.Generate(self._request, metadata=self._trace.headers)

    def _resume(self) -> EventCall:
        return self._connection.stub.Resume(
            request_of(
                chat_pb2.ResumeRequest,
                session_id=self.session_id,
                turn_id=self.turn_id,
                from_index=self._tracker.next_index,
            ),
            metadata=self._trace.headers,
        )

    async def _read(self, call: EventCall) -> AsyncGenerator[TurnEvent]:
        try:
            async for message in call:
                self._tracker.check_turn(message.event.turn_id)
                event = event_of(message.event)
                if event is not None and self._tracker.accept(event):
                    yield event
                if self._tracker.finished:
                    return
        except grpc.aio.AioRpcError as error:
            raise map_rpc_error(error, self._connection.address) from None
        finally:
            call.cancel()
        raise Unavailable(f"the coordinator at {self._connection.address} closed the stream before the turn had ended")
