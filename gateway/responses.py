"""The endpoints under /v1/responses. A response is a session that ends with its turn: it can be read, gone on from by
`previous_response_id`, and streamed again from any event on, at any gateway of the cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.client import AsyncSession, AsyncTurn, ClientError, NotFound, SessionDetails, TurnState
from kvferry.gateway import sse
from kvferry.gateway.body import read_body
from kvferry.gateway.context import Context, context_of
from kvferry.gateway.errors import ApiError, api_error_of, invalid
from kvferry.gateway.response_events import Json, ResponseStream, base_response
from kvferry.gateway.responses_request import ResponseRequest
from kvferry.telemetry.logs import log_with

PREFIX: Final = "resp_"


async def create_response(request: Request) -> Response:
    """POST /v1/responses: whole, streamed, or in the background. Raises ApiError and ClientError."""
    context = context_of(request)
    asked = await read_body(request, ResponseRequest)
    asked.check()
    if asked.stream and (last_id := request.headers.get(sse.LAST_EVENT_ID)) is not None:
        response_id, (seen, *_) = sse.parse_event_id(last_id)
        return await _streamed_again(context, response_id, seen)
    messages, form = asked.messages(), asked.form()
    sampling = asked.sampling(context.new_seed, logprobs=asked.wants_logprobs, top_logprobs=asked.top_logprobs)
    session = await _new_session(context, asked)
    log_with(session_id=session.id)
    turn = session.generate(messages, sampling=sampling, max_tokens=asked.max_output_tokens or 0, form=form)
    stream = ResponseStream(_base(await session.details()) | {"store": asked.is_stored})
    forget = None if asked.is_stored else session.delete
    if asked.stream:
        return await sse.EventStream.begun(_frames(turn, stream, after=-1, forget=forget))
    if asked.background:
        started = await anext(turn)  # its record is durable: it goes on without us
        stream.push(started)
        context.in_background(_collected(turn, ResponseStream(stream.base)))
        return JSONResponse(stream.response)
    try:
        return JSONResponse(await _collected(turn, stream))
    finally:
        if forget is not None:
            context.in_background(forget())


async def get_response(request: Request) -> Response:
    """GET /v1/responses/ID: as it is now; with ?stream=true its events, those after ?starting_after=N."""
    context, response_id = context_of(request), request.path_params["response_id"]
    if request.query_params.get("stream", "false").lower() == "true":
        given = request.query_params.get("starting_after", "-1")
        after = -1 if given == "-1" else sse.parse_number(given)
        if after is None:
            raise invalid(f"starting_after is {given[:20]!r}, it must be the number of an event", "starting_after")
        return await _streamed_again(context, response_id, after)
    return JSONResponse(await _as_it_is(context, response_id))


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/ID/cancel: it keeps what it has."""
    context, response_id = context_of(request), request.path_params["response_id"]
    details = await _details(context, response_id)
    session = context.client.session(response_id)
    if details.session.open_turn_id:
        await session.cancel(details.session.open_turn_id)
        return JSONResponse(await _collected(session.resume(), ResponseStream(_base(details))))
    return JSONResponse(await _as_it_is(context, response_id))


async def delete_response(request: Request) -> Response:
    """DELETE /v1/responses/ID."""
    context, response_id = context_of(request), request.path_params["response_id"]
    await _details(context, response_id)
    await context.client.session(response_id).delete()
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _new_session(context: Context, asked: ResponseRequest) -> AsyncSession:
    name, previous_id = f"{PREFIX}{context.new_id()}", asked.previous_response_id
    if previous_id is None:
        expires_after_s = context.keep_responses_seconds if asked.is_stored else context.keep_seconds
        return await context.client.create_session(
            name, model=await context.models.find(asked.model), expires_after_s=expires_after_s
        )
    details = await _details(context, previous_id, parameter="previous_response_id")
    if details.session.open_turn_id:
        raise ApiError(
            409, f"{previous_id} is not complete yet; wait for it", code="response_in_progress",
            parameter="previous_response_id", retry_after_s=1.0,
        )  # fmt: skip
    return await context.client.session(previous_id).fork(name)


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
    return base_response(session.session_id, session.created_at_ms // 1000, session.model, previous, "queued")


async def _as_it_is(context: Context, response_id: str) -> Json:
    details = await _details(context, response_id)
    stream = ResponseStream(_base(details))
    latest = details.turns[-1] if details.turns else None
    if latest is not None and latest.state is TurnState.FINISHED:
        return await _collected(context.client.session(response_id).resume(latest.turn_id), stream)
    if latest is not None and latest.state is TurnState.RUNNING:
        stream.base["status"] = "in_progress"
    return stream.response


async def _collected(turn: AsyncTurn, stream: ResponseStream) -> Json:
    async with turn:
        async for event in turn:
            stream.push(event)
    return stream.response


async def _streamed_again(context: Context, response_id: str, after: int) -> Response:
    details = await _details(context, response_id)
    frames = _frames(context.client.session(response_id).resume(), ResponseStream(_base(details)), after)
    return await sse.EventStream.begun(frames)


async def _frames(
    turn: AsyncTurn, stream: ResponseStream, after: int, forget: Callable[[], Awaitable[None]] | None = None
) -> AsyncGenerator[bytes]:
    """Those after this number. Raises ClientError before the first of them. ``forget``: what is done at the end."""
    is_begun = False
    try:
        async with turn:
            async for item in turn:
                for event in stream.push(item):
                    number = event["sequence_number"]
                    if number > after:
                        is_begun = True
                        yield sse.encode(event, event_id=sse.event_id(stream.base["id"], [number]), event=event["type"])
        if forget is not None:
            await forget()
    except ClientError as error:
        if not is_begun:
            raise
        told = api_error_of(error).body()["error"]
        yield sse.encode({"type": "error", **told, "sequence_number": after + 1}, event="error")
