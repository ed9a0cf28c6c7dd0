"""The endpoints under /v1/responses. A response is a session that ends with its turn: it can be read, gone on from by
`previous_response_id`, and streamed again from any event on, at any gateway of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.client import AsyncSession, AsyncTurn, ClientError, NotFound, SessionDetails, TurnState
from kvferry.gateway import sse
from kvferry.gateway.body import read_body
from kvferry.gateway.context import Context, context_of
from kvferry.gateway.errors import ApiError, api_error_of, invalid
from kvferry.gateway.lifetimes import answered
from kvferry.gateway.response_events import Json, ResponseStream, base_response
from kvferry.gateway.responses_request import ResponseRequest
from kvferry.telemetry.logs import log_with

PREFIX: Final = "resp_"

UNSTORED: Final = f"{PREFIX}once_"
"""Of responses that are deleted once they are told, whichever gateway tells them."""


async def create_response(request: Request) -> Response:
    """POST /v1/responses: whole, streamed, or in the background. Raises ApiError and ClientError."""
    context = context_of(request)
    asked = await read_body(request, ResponseRequest)
    asked.check()
    if asked.stream and (last_id := request.headers.get(sse.LAST_EVENT_ID)) is not None:
        response_id, (seen, *_) = sse.parse_event_id(last_id)
        return await _streamed_again(context, response_id, seen)
    response_id = f"{PREFIX if asked.is_stored else UNSTORED}{context.new_id()}"
    log_with(session_id=response_id)
    forget = context.client.session(response_id).delete  # ends its turn as well
    return await answered(request, context, _begun(context, asked, response_id), if_refused=forget, if_left=forget)


async def _begun(context: Context, asked: ResponseRequest, response_id: str) -> Response:
    """A new response. Raises ApiError and ClientError."""
    messages, form = asked.messages(), asked.form()
    sampling = asked.sampling(context.new_seed, logprobs=asked.wants_logprobs, top_logprobs=asked.top_logprobs)
    session = await _new_session(context, asked, response_id)
    turn = session.generate(messages, sampling=sampling, max_tokens=asked.max_output_tokens or 0, form=form)
    stream = ResponseStream(_base(await session.details()))
    if asked.stream:
        return await sse.EventStream.begun(_frames(context, turn, stream, after=-1))
    if asked.background:
        started = await anext(turn)  # its record is durable: it goes on without us
        stream.push(started)
        context.in_background(_collected(context, turn, ResponseStream(stream.base)))
        return JSONResponse(stream.response)
    return JSONResponse(await _collected(context, turn, stream))


async def get_response(request: Request) -> Response:
    """GET /v1/responses/ID: as it is now; with ?stream=true its events, those after ?starting_after=N or the header.

    A browser's EventSource asks again with the header when the stream has ended, until it is told that that was all.
    """
    context, response_id = context_of(request), request.path_params["response_id"]
    if request.query_params.get("stream", "false").lower() == "true":
        given = request.query_params.get("starting_after", "-1")
        after = -1 if given == "-1" else sse.parse_number(given)
        if after is None:
            raise invalid(f"starting_after is {given[:20]!r}, it must be the number of an event", "starting_after")
        if (last_id := request.headers.get(sse.LAST_EVENT_ID)) is None:
            return await _streamed_again(context, response_id, after)
        named_id, (seen, *_) = sse.parse_event_id(last_id)
        if named_id != response_id:
            raise invalid(f"Last-Event-ID is of {named_id}, and this is {response_id}", None)
        stream = await _streamed_again(context, response_id, max(seen, after))
        return Response(status_code=204) if stream.is_empty else stream
    return JSONResponse(await _as_it_is(context, response_id))


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/ID/cancel: it keeps what it has."""
    context, response_id = context_of(request), request.path_params["response_id"]
    details = await _details(context, response_id)
    session = context.client.session(response_id)
    if details.session.open_turn_id:
        await session.cancel(details.session.open_turn_id)
        return JSONResponse(await _collected(context, session.resume(), ResponseStream(_base(details))))
    return JSONResponse(await _as_it_is(context, response_id))


async def delete_response(request: Request) -> Response:
    """DELETE /v1/responses/ID."""
    context, response_id = context_of(request), request.path_params["response_id"]
    await _details(context, response_id)
    await context.client.session(response_id).delete()
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _new_session(context: Context, asked: ResponseRequest, response_id: str) -> AsyncSession:
    previous_id = asked.previous_response_id
    if previous_id is None:
        expires_after_s = context.keep_responses_seconds if asked.is_stored else context.keep_seconds
        return await context.client.create_session(
            response_id, model=await context.models.find(asked.model), expires_after_s=expires_after_s
        )
    details = await _details(context, previous_id, parameter="previous_response_id")
    if details.session.open_turn_id:
        raise ApiError(
            409, f"{previous_id} is not complete yet; wait for it", code="response_in_progress",
            parameter="previous_response_id", retry_after_s=1.0,
        )  # fmt: skip
    has = details.session.model
    if asked.model and (model := await context.models.find(asked.model)) != has:
        raise invalid(f"{previous_id} is of {has}, and what follows it cannot be of {model}", "model")
    return await context.client.session(previous_id).fork(response_id)


async def _details(context: Context, response_id: str, parameter: str | None = None) -> SessionDetails:
    if not response_id.startswith(PREFIX):
        raise ApiError(404, f"{response_id!r} is no response's id", code="response_not_found", parameter=parameter)
    try:
        return await context.client.session(response_id).details()
    except NotFound as error:
        raise ApiError(
            404, f"there is no response {response_id}", code="response_not_found", parameter=parameter
        ) from error


def _base(details: SessionDetails) -> Json:
    session = details.session
    previous = session.forked_from if session.forked_from.startswith(PREFIX) else None
    return base_response(
        session.session_id, session.created_at_ms // 1000, session.model, previous, "queued",
        is_stored=_is_stored(session.session_id),
    )  # fmt: skip


def _is_stored(response_id: str) -> bool:
    return not response_id.startswith(UNSTORED)


async def _as_it_is(context: Context, response_id: str) -> Json:
    details = await _details(context, response_id)
    stream = ResponseStream(_base(details))
    latest = details.turns[-1] if details.turns else None
    if latest is not None and latest.state is TurnState.FINISHED:
        return await _collected(context, context.client.session(response_id).resume(latest.turn_id), stream)
    if latest is not None and latest.state is TurnState.RUNNING:
        stream.base["status"] = "in_progress"
    return stream.response


async def _collected(context: Context, turn: AsyncTurn, stream: ResponseStream) -> Json:
    async with turn:
        async for event in turn:
            stream.push(event)
    if not _is_stored(turn.session_id):
        context.in_background(context.client.session(turn.session_id).delete())
    return stream.response


async def _streamed_again(context: Context, response_id: str, after: int) -> sse.EventStream:
    details = await _details(context, response_id)
    frames = _frames(context, context.client.session(response_id).resume(), ResponseStream(_base(details)), after)
    return await sse.EventStream.begun(frames)


async def _frames(context: Context, turn: AsyncTurn, stream: ResponseStream, after: int) -> AsyncGenerator[bytes]:
    """Those after this number. Raises ClientError before the first of them."""
    is_begun = False
    try:
        async with turn:
            async for item in turn:
                for event in stream.push(item):
                    number = event["sequence_number"]
                    if number > after:
                        is_begun = True
                        yield sse.encode(event, event_id=sse.event_id(stream.base["id"], [number]), event=event["type"])
        if not _is_stored(turn.session_id):
            deleting = context.in_background(context.client.session(turn.session_id).delete())
            await asyncio.shield(deleting)  # also for readers who go when they have it all
    except ClientError as error:
        if not is_begun:
            raise
        told = api_error_of(error)
        # without an id: who comes back asks for what follows the last event that is the response's own
        yield sse.encode(stream.error(str(told), told.code, told.parameter), event="error")
