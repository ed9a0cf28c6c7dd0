"""WorkerService: thin handlers that parse, bound, hand over, and stream. No engine and no store call is made here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Final, Protocol, TypeVar

import grpc

from kvferry.engine.errors import EngineError
from kvferry.engine.token_rule import TokenRule
from kvferry.node.errors import InvalidRequest, NodeError, StoreDown
from kvferry.node.messages import (
    BeginTurn,
    DrainCount,
    DropSession,
    Published,
    Reply,
    RestoreSession,
    SaveSession,
    StopRun,
)
from kvferry.node.run_trace import RunTrace
from kvferry.node.state import NodeState
from kvferry.node.turns import Event, Failed, Finished, Prefix, Turn
from kvferry.node.wire import (
    parse_counts,
    parse_images,
    parse_name,
    parse_namespace,
    parse_sampling,
    parse_tokens,
    prefix_message,
    process_message,
    resident_messages,
    run_messages,
    snapshot_message,
)
from kvferry.proto.status import status_of, trailing_metadata
from kvferry.proto.v1 import worker_pb2, worker_pb2_grpc
from kvferry.telemetry.logs import log_with

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request")
Response = TypeVar("Response")

SAVE_TIMEOUT_SECONDS: Final = 60.0
"""For a caller without a deadline: 1.9 GB (8K tokens of a 2B model) take 16 s over 1 GbE."""

MAX_DRAIN_SECONDS: Final = 3600.0


class Drainer(Protocol):
    """Whoever can drain the node."""

    async def drain(self, timeout_seconds: float, finish_seconds: float) -> DrainCount:
        """Refuse new turns, let the running ones finish, end the others, save what is resident, leave the fleet."""


async def _abort(context: Context, error: Exception) -> None:
    """End a call with an error's status, sentence, code and retry hint."""
    code = str(getattr(error, "code", "internal"))
    retry_after_ms = getattr(error, "retry_after_ms", None)
    await context.abort(status_of(code), str(error), trailing_metadata(code, retry_after_ms))


def _answered(
    handler: Callable[[Any, Request, Context], Coroutine[Any, Any, Response]],
) -> Callable[[Any, Request, Context], Coroutine[Any, Any, Response]]:
    """Our errors leave as a status; anything else is a bug and says no more than that."""

    @wraps(handler)
    async def wrapped(self: Any, request: Request, context: Context) -> Response:
        try:
            return await handler(self, request, context)
        except (NodeError, EngineError) as error:
            if isinstance(request, worker_pb2.RunTurnRequest):
                self._state.refusals[error.code] += 1
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            if context.done():  # the caller went away in the middle of a write
                raise
            log.exception("a bug in %s", handler.__name__)
            await _abort(context, NodeError(f"a bug in this node's {handler.__name__}; its log says more"))
        raise AssertionError("abort raises")

    return wrapped


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """What the coordinator asks of a node; see worker.proto."""

    def __init__(self, state: NodeState, drainer: Drainer) -> None:
        self._state = state
        self._drainer = drainer

    @_answered
    async def RunTurn(self, request: worker_pb2.RunTurnRequest, context: Context) -> None:  # type: ignore[override]
        """Run a turn, and stop it when the caller goes away."""
        parse_counts(request, self._state.ready().identity.context_length)
        # Before it is admitted: a turn of an older epoch must not begin after one of a newer.
        rule = await self._state.ready().rules.rule(request.grammar, request.token_ids[request.n_prompt_tokens :])
        turn = self._admit(request, rule)
        log_with(session_id=turn.session_id, turn_id=turn.turn_id, epoch=turn.epoch)
        trace = RunTrace(turn, context)
        self._state.store_watch.follow(turn.session_id, trace.span)
        engine = self._state.ready().engine
        self._state.open_turn(turn)
        try:
            engine.send(BeginTurn(turn))
            await _stream(turn, context, trace)
        finally:
            trace.span.end()
            self._state.close_turn(turn)
            if not turn.outbox.closed:
                engine.send(StopRun(turn.run_id))

    def _admit(self, request: worker_pb2.RunTurnRequest, rule: TokenRule | None) -> Turn:
        identity = self._state.ready().identity
        now = time.monotonic()
        session_id = parse_name("session_id", request.session_id)
        turn_id = parse_name("turn_id", request.turn_id)
        token_ids = parse_tokens(request.token_ids, identity.model_config.vocab_size, identity.context_length)
        images, pixels = parse_images(request.images, token_ids[: request.n_prompt_tokens], identity.vision)
        sampling = parse_sampling(request.sampling)
        self._state.fence.admit(
            session_id, request.epoch, request.coordinator_generation, now, request.coordinator_instance
        )
        self._state.check_room(session_id, request.epoch)
        return Turn(
            run_id=self._state.next_run_id(),
            session_id=session_id,
            turn_id=turn_id,
            epoch=request.epoch,
            token_ids=token_ids,
            n_prompt_tokens=request.n_prompt_tokens,
            sampling=sampling,
            max_tokens=request.max_tokens,
            end_token_ids=frozenset(request.end_token_ids),
            arrived_at=now,
            coordinator=request.coordinator_instance,
            priority=request.priority,
            recompute=request.recompute,
            images=images,
            pixels=pixels,
            rule=rule,
            namespace=parse_namespace(request.namespace),
        )

    @_answered
    async def StopTurn(self, request: worker_pb2.StopTurnRequest, context: Context) -> worker_pb2.StopTurnResponse:
        """Unknown turns are no error, nor are runs of a higher epoch: those are somebody else's."""
        del context
        turn = self._state.find_turn(request.session_id, request.turn_id)
        if turn is not None and turn.epoch <= request.epoch:
            self._state.ready().engine.send(StopRun(turn.run_id))
        return worker_pb2.StopTurnResponse()

    @_answered
    async def RestoreSession(
        self, request: worker_pb2.RestoreSessionRequest, context: Context
    ) -> worker_pb2.RestoreSessionResponse:
        """Bring a prefix into memory."""
        serving = self._state.ready()
        identity = serving.identity
        session_id = parse_name("session_id", request.session_id)
        token_ids = parse_tokens(request.token_ids, identity.model_config.vocab_size, identity.context_length)
        images, _ = parse_images(request.images, token_ids, identity.vision)
        reply: Reply[Prefix] = Reply()
        namespace = parse_namespace(request.namespace)
        serving.engine.send(RestoreSession(session_id, token_ids, images, reply, namespace))
        prefix = await _in_time(reply.wait(), context, self._state.config.restore_deadline_seconds + 1.0)
        return worker_pb2.RestoreSessionResponse(prefix=prefix_message(prefix))

    @_answered
    async def SaveSession(
        self, request: worker_pb2.SaveSessionRequest, context: Context
    ) -> worker_pb2.SaveSessionResponse:
        """Publish a session and wait for it."""
        serving = self._state.ready()
        reply: Reply[Published] = Reply()
        serving.engine.send(SaveSession(parse_name("session_id", request.session_id), reply))
        published = await _in_time(reply.wait(), context, SAVE_TIMEOUT_SECONDS)
        snapshot = snapshot_message(published, serving.identity.fingerprint)
        return worker_pb2.SaveSessionResponse(snapshot=snapshot)

    @_answered
    async def DropSession(
        self, request: worker_pb2.DropSessionRequest, context: Context
    ) -> worker_pb2.DropSessionResponse:
        """Forget a session."""
        reply: Reply[None] = Reply()
        self._state.ready().engine.send(DropSession(parse_name("session_id", request.session_id), reply))
        await _in_time(reply.wait(), context, SAVE_TIMEOUT_SECONDS)
        return worker_pb2.DropSessionResponse()

    @_answered
    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        """Let go of everything; the process stays until it is told to end."""
        del context
        self._state.ready()
        timeout_seconds = request.timeout_seconds or self._state.config.drain_timeout_seconds
        if not 0 < timeout_seconds <= MAX_DRAIN_SECONDS:
            raise InvalidRequest(f"timeout_seconds is {timeout_seconds}, it must lie in (0, {MAX_DRAIN_SECONDS:g}]")
        finish_seconds = request.finish_seconds
        if not 0 <= finish_seconds <= MAX_DRAIN_SECONDS:
            raise InvalidRequest(f"finish_seconds is {finish_seconds}, it must lie in [0, {MAX_DRAIN_SECONDS:g}]")
        count = await self._drainer.drain(timeout_seconds, finish_seconds)
        return worker_pb2.DrainResponse(n_sessions_saved=count.n_sessions_saved, n_turns_moved=count.n_turns_moved)

    @_answered
    async def GetNodeStatus(
        self, request: worker_pb2.GetNodeStatusRequest, context: Context
    ) -> worker_pb2.GetNodeStatusResponse:
        """Who this is and how it is."""
        del request, context
        serving = self._state.ready()
        identity = serving.identity
        now = time.monotonic()
        return worker_pb2.GetNodeStatusResponse(
            node_id=self._state.config.node_id,
            version=identity.version,
            model=identity.model,
            fingerprint=identity.fingerprint,
            geometry=identity.geometry,
            kernel_path=identity.kernel_path,
            weights=identity.weights,
            n_threads=identity.n_threads,
            cores=identity.cores,
            draining=self._state.fence.draining,
            load=serving.load(now),
            resident=resident_messages(serving.engine.view),
            uptime_seconds=now - self._state.started_at,
            context_length=identity.context_length,
            process=process_message(self._state.loop_lag.summary(), len(asyncio.all_tasks()), self._state.n_turns),
        )


async def _stream(turn: Turn, context: Context, trace: RunTrace) -> None:
    """Pass events on until the last one; what waits together travels together."""
    while True:
        events = await turn.outbox.take()
        for event in events:
            trace.note(event)
        sendable = [event for event in events if not isinstance(event, Failed)]
        for message in run_messages(sendable):
            await context.write(message)
        last: Event = events[-1]
        if isinstance(last, Failed):
            await _abort(context, last.error)
        if isinstance(last, Finished):
            return


async def _in_time(answer: Awaitable[Response], context: Context, seconds: float) -> Response:
    """The answer within the caller's deadline and ours; raises StoreDown after it."""
    remaining = context.time_remaining()
    try:
        return await asyncio.wait_for(answer, min(seconds, remaining or seconds))
    except TimeoutError as error:
        raise StoreDown("the store did not answer in time; the session is as it was") from error
