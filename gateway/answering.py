"""Answers on their way to whoever asked for them, whole or as a stream: what chat and text completions share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.client import AsyncSamples, ClientError, Finished, FinishReason, NodeLost, TurnEvent, TurnFailed
from kvferry.gateway import asking, sse
from kvferry.gateway.context import Context
from kvferry.gateway.errors import ApiError, api_error_of, invalid
from kvferry.gateway.lifetimes import answered
from kvferry.telemetry.logs import log_with

Json = dict[str, Any]


class Choice(Protocol):
    """One answer so far.

    Each event that adds something makes one part of one chunk, so that its place in the stream, `place`, is also the
    reader's: whoever has a chunk has all that came before it.
    """

    place: int  # events with a part so far
    n_prompt: int
    n_cached: int
    finished: Finished | None

    def push(self, event: TurnEvent) -> Json | None:
        """What one event adds to the stream, if anything."""

    def whole(self) -> Json:
        """As an answer that is not streamed has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an endpoint's bodies are: the `object` of a whole one and of a chunk, the ids' beginning, the choices."""

    kind: str
    chunk_kind: str
    id_prefix: str
    new_choice: Callable[[int], Choice]


async def answer(
    request: Request, context: Context, order: asking.Order, shape: Shape, *, stream: bool, wants_usage: bool
) -> Response:
    """Whole, or as a stream that may be picked up again with Last-Event-ID. Raises ApiError and ClientError."""
    last_id = request.headers.get(sse.LAST_EVENT_ID)
    if last_id is not None and stream:
        request_id, seen = sse.parse_event_id(last_id)
        if len(seen) != order.n_answers:
            raise invalid(f"Last-Event-ID is of {len(seen)} answers, and this request asks {order.n_answers}", None)
    else:
        request_id, seen = f"{shape.id_prefix}{context.new_id()}", (0,) * order.n_answers
    log_with(session_id=asking.session_of(request_id, 0))
    head: Json = {"id": request_id, "created": int(context.wall_clock()), "model": order.model}
    choices = [shape.new_choice(index) for index in range(order.n_answers)]

    async def told(streams: Sequence[AsyncSamples]) -> Response:
        events = asking.events_of(streams, order.n)
        if not stream:
            return await _collected({**head, "object": shape.kind}, choices, events, order.n)
        frames = Frames({**head, "object": shape.chunk_kind}, choices, seen, order.n, wants_usage=wants_usage)
        return await sse.EventStream.begun(frames.of(events))

    async def begun() -> Response:
        return await told(await asking.start(context.client, request_id, order, context.keep_seconds))

    if last_id is not None and stream:
        return await told(asking.resume(context.client, request_id, order))
    return await answered(
        request, context, begun(),
        if_refused=lambda: asking.forget(context.client, request_id, order),
        if_left=lambda: asking.cancel(context.client, request_id, order),
    )  # fmt: skip


async def _collected(
    head: Json, choices: Sequence[Choice], events: AsyncGenerator[asking.AnswerEvent], n: int
) -> Response:
    async with aclosing(events) as coming:
        async for number, event in coming:
            choices[number].push(event)
            _raise_if_failed(event)
    return JSONResponse({**head, "choices": [one.whole() for one in choices], "usage": usage_of(choices, n)})


class Frames:
    """The stream's events, ready to be sent. `seen`: of each answer, how far its reader had come."""

    def __init__(
        self, head: Json, choices: Sequence[Choice], seen: Sequence[int], n: int, *, wants_usage: bool
    ) -> None:
        self._choices, self._n, self._wants_usage = choices, n, wants_usage
        # Of a reader who has all that was sent, and before that all that he had.
        self._places = list(seen)
        # What is the same in each chunk is made once: a stream has thousands.
        self._before = f'data: {sse.to_json(head)[:-1]},"choices":['
        self._after = '],"usage":null}\nid: ' if wants_usage else "]}\nid: "
        self._request_id = head["id"]

    async def of(self, events: AsyncGenerator[asking.AnswerEvent]) -> AsyncGenerator[bytes]:
        """Raises ApiError and ClientError before the first of them; later an error is an event."""
        is_begun = False
        try:
            async with aclosing(events) as coming:
                async for number, event in coming:
                    choice = self._choices[number]
                    part = choice.push(event)
                    if isinstance(event, NodeLost):
                        is_begun = True  # the remark takes the status with it
                        yield sse.comment(f"{event.node_id} was lost ({event.cause}), the answer goes on elsewhere")
                    elif part is not None:
                        _raise_if_failed(event)
                        if choice.place > self._places[number]:
                            self._places[number] = choice.place
                            is_begun = True
                            yield self._chunk(part)
        except (ApiError, ClientError) as error:
            if not is_begun:
                raise
            api_error = error if isinstance(error, ApiError) else api_error_of(error)
            yield sse.encode(api_error.body())
            return
        if self._wants_usage:
            usage = sse.to_json(usage_of(self._choices, self._n))
            yield f'{self._before}],"usage":{usage}}}\nid: {self._event_id()}\n\n'.encode()
        yield sse.DONE

    def _chunk(self, part: Json) -> bytes:
        return f"{self._before}{sse.to_json(part)}{self._after}{self._event_id()}\n\n".encode()

    def _event_id(self) -> str:
        return sse.event_id(self._request_id, self._places)


def usage_of(choices: Sequence[Choice], n: int) -> Json:
    """A prompt counts once, however many answers it has; `cached_tokens` is what the first of them found."""
    prompts = choices[::n]
    n_prompt = sum(choice.n_prompt for choice in prompts)
    n_answer = sum(choice.finished.n_answer_tokens for choice in choices if choice.finished is not None)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": sum(choice.n_cached for choice in prompts)},
    }


def _raise_if_failed(event: object) -> None:
    if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
        raise TurnFailed(event.error or "the turn failed", turn_code=event.error_code)
