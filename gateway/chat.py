"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvferry.client import AsyncTurn, ClientError, Finished, FinishReason, NodeLost, TurnFailed
from kvferry.gateway import sse
from kvferry.gateway.body import read_body
from kvferry.gateway.chat_request import ChatRequest
from kvferry.gateway.choices import Choice, Json, usage_of
from kvferry.gateway.context import Context, context_of
from kvferry.gateway.errors import ApiError, api_error_of
from kvferry.gateway.messages import messages_of
from kvferry.gateway.samples import TurnOrder, merged, resume_samples, session_of, start_samples, with_pauses
from kvferry.telemetry.logs import log_with

LAST_EVENT_ID = "last-event-id"


async def chat_completions(request: Request) -> Response:
    """Whole, or as a stream that may be picked up again with Last-Event-ID. Raises ApiError and ClientError."""
    context = context_of(request)
    asked = await read_body(request, ChatRequest)
    asked.check()
    model = await context.models.find(asked.model)
    last_id = request.headers.get(LAST_EVENT_ID)
    if last_id is not None and asked.stream:
        request_id, seen = sse.parse_event_id(last_id)
        turns = resume_samples(context.client, request_id, len(seen))
    else:
        request_id, seen = f"chatcmpl-{context.new_id()}", (0,) * asked.n
        turns = await start_samples(context.client, request_id, model, _order(asked, context), asked.n)
    log_with(session_id=session_of(request_id, 0))
    answer = ChatAnswer(request_id, asked, context, model, turns, seen)
    return await answer.streamed() if asked.stream else await answer.collected()


def _order(asked: ChatRequest, context: Context) -> TurnOrder:
    return TurnOrder(
        messages=messages_of(asked.messages),
        sampling=asked.sampling(context.new_seed, logprobs=asked.logprobs, top_logprobs=asked.top_logprobs),
        max_tokens=asked.n_tokens_at_most,
        stop=asked.stops,
        form=asked.form(),
    )


class ChatAnswer:
    """The answers to one request, on their way. `seen`: of each, how far its reader had come."""

    def __init__(
        self,
        request_id: str,
        asked: ChatRequest,
        context: Context,
        model: str,
        turns: Sequence[AsyncTurn],
        seen: Sequence[int],
    ) -> None:
        self._request_id, self._asked, self._turns = request_id, asked, turns
        self._created = int(context.wall_clock())
        self._model = model
        self._seen = seen
        self._choices = [Choice(index) for index in range(len(turns))]

    async def collected(self) -> Response:
        """All of it at once."""
        async for sample, event in merged(self._turns):
            self._choices[sample].push(event)
            _raise_if_failed(event)
        body = self._body("chat.completion", [c.whole(with_logprobs=self._asked.logprobs) for c in self._choices])
        return JSONResponse({**body, "usage": usage_of(self._choices)})

    async def streamed(self) -> Response:
        """The status is told with the first event: until then an error still has one of its own."""
        chunks = self._chunks()
        first = await anext(chunks)

        async def whole() -> AsyncIterator[bytes]:
            yield first
            async for chunk in chunks:
                yield chunk

        return StreamingResponse(whole(), media_type="text/event-stream", headers=sse.HEADERS)

    async def _chunks(self) -> AsyncIterator[bytes]:
        is_begun = False
        try:
            async for item in with_pauses(merged(self._turns), sse.KEEP_ALIVE_SECONDS):
                if item is None:
                    yield sse.KEEP_ALIVE
                    continue
                sample, event = item
                part = self._choices[sample].push(event)
                _raise_if_failed(event)
                if isinstance(event, NodeLost):
                    yield sse.comment(f"{event.node_id} was lost ({event.cause}), the answer goes on elsewhere")
                if part is not None and self._choices[sample].place > self._seen[sample]:
                    is_begun = True
                    yield self._chunk([part])
        except (ApiError, ClientError) as error:
            if not is_begun:
                raise
            api_error = error if isinstance(error, ApiError) else api_error_of(error)
            yield sse.encode(api_error.body())
            return
        if self._asked.wants_usage:
            yield self._chunk([], usage=usage_of(self._choices))
        yield sse.DONE

    def _chunk(self, parts: list[Json], usage: Json | None = None) -> bytes:
        body = self._body("chat.completion.chunk", parts)
        if self._asked.wants_usage:
            body["usage"] = usage
        return sse.encode(body, event_id=sse.event_id(self._request_id, self._places()))

    def _places(self) -> list[int]:
        """Of a reader who has all that was sent, and before that all that he had."""
        return [max(choice.place, seen) for choice, seen in zip(self._choices, self._seen, strict=True)]

    def _body(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._request_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def _raise_if_failed(event: object) -> None:
    if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
        raise TurnFailed(event.error or "the turn failed", turn_code=event.error_code)
