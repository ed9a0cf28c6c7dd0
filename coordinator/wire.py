"""Records and members as messages, and errors as gRPC statuses. Nothing decides here."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import grpc
import grpc.aio

from kvferry.coordinator.answer_parts import call_message, parsed, parsed_message
from kvferry.coordinator.errors import CoordinatorError
from kvferry.coordinator.membership import Load, Member, Node, NodeState
from kvferry.coordinator.models import ServedModel
from kvferry.coordinator.registry import Message, SessionRecord, TurnRecord
from kvferry.coordinator.snapshots import WhichStore
from kvferry.proto.status import status_of, trailing_metadata
from kvferry.proto.v1 import chat_pb2, common_pb2, fleet_pb2, worker_pb2
from kvferry.telemetry import tracing
from kvferry.trust.errors import Refused

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: Context, error: Exception) -> NoReturn:
    """End the call with the error's status, sentence and code."""
    if isinstance(error, grpc.aio.AioRpcError):  # another coordinator's word, passed on
        await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    code = getattr(error, "code", None)
    if not isinstance(code, str):
        logger.error("a call met a bug", exc_info=error)
        await context.abort(
            grpc.StatusCode.INTERNAL, "the coordinator met a bug, its log says which", trailing_metadata("internal")
        )
    retry_after_ms = error.retry_after_ms if isinstance(error, CoordinatorError | Refused) else None
    await context.abort(status_of(code), str(error), trailing_metadata(code, retry_after_ms))


def unary(method: Callable[[Any, Any, Context], Awaitable[T]]) -> Callable[[Any, Any, Context], Awaitable[T]]:
    """A handler whose errors are our own exceptions."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> T:
        try:
            return await method(self, request, context)
        except Exception as e:  # noqa: BLE001 - every error becomes a status here, bugs are logged
            await refuse(context, e)

    return handler


def streaming(
    method: Callable[[Any, Any, Context], AsyncIterator[T]],
) -> Callable[[Any, Any, Context], AsyncIterator[T]]:
    """The same for a handler that streams."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> AsyncIterator[T]:
        if tracing.is_on():
            tracing.follow(context.invocation_metadata())
        try:
            async for message in method(self, request, context):
                yield message
        except Exception as e:  # noqa: BLE001 - every error becomes a status here, bugs are logged
            await refuse(context, e)

    return handler


def session_message(record: SessionRecord, last_node_id: str) -> chat_pb2.Session:
    return chat_pb2.Session(
        session_id=record.session_id,
        model=record.model,
        created_at_ms=record.created_at_ms,
        updated_at_ms=record.updated_at_ms,
        n_tokens=record.n_tokens,
        n_turns=record.n_turns,
        epoch=record.epoch,
        open_turn_id=record.open_turn_id,
        forked_from=record.forked_from,
        last_node_id=last_node_id,
        tenant=record.tenant,
        expires_after_seconds=record.expires_after_s,
    )


def turn_message(record: TurnRecord, placements: Iterable[chat_pb2.Placement], *, running: bool) -> chat_pb2.Turn:
    state = chat_pb2.TURN_STATE_RUNNING if running else chat_pb2.TURN_STATE_WAITING
    message = chat_pb2.Turn(
        turn_id=record.turn_id,
        state=state if record.outcome is None else chat_pb2.TURN_STATE_FINISHED,
        messages=[message_message(message) for message in record.messages],
        n_prompt_tokens=record.n_prompt_tokens,
        placements=placements,
    )
    for p in record.pictures:
        message.messages[p.message].images.add(
            at=p.at,
            content_hash=p.content_hash,
            width=p.width,
            height=p.height,
            n_tokens=p.n_tokens,
            start=p.start,
        )
    if (outcome := record.outcome) is not None:
        message.answer = outcome.answer_text
        message.finish_reason = common_pb2.FinishReason.ValueType(outcome.reason)
        message.n_answer_tokens = len(outcome.answer_ids)
        message.parsed.CopyFrom(parsed_message(parsed(record, outcome.answer_text)))
    return message


def message_message(message: Message) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=[call_message(call) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
    )


def model_message(model: ServedModel, nodes: Sequence[Node]) -> chat_pb2.ModelInfo:
    """``nodes``: those that serve it."""
    return chat_pb2.ModelInfo(
        name=model.name,
        tokenizer_digest=model.text.digest,
        vocabulary_size=model.text.vocab_size,
        context_length=model.context_length,
        sees_images=model.sees_images,
        n_nodes=len(nodes),
        fingerprints=sorted({node.fingerprint for node in nodes}),
    )


def node_message(member: Member) -> chat_pb2.NodeInfo:
    node, load = member.node, member.node.load
    return chat_pb2.NodeInfo(
        node_id=node.node_id,
        address=node.address,
        state=chat_pb2.NodeState.ValueType(member.state),
        model=node.model,
        fingerprint=node.fingerprint,
        n_running=load.n_running,
        n_queued=load.n_queued,
        n_resident_sessions=len(node.resident),
        kv_bytes_used=load.kv_bytes_used,
        kv_bytes_budget=load.kv_bytes_budget,
        seconds_since_heartbeat=member.silent_seconds,
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        decode_tokens_per_second=load.decode_tokens_per_second,
        kernel_path=node.kernel_path,
        sees_images=node.sees_images,
        store_ok=load.store_ok,
        n_threads=node.n_threads,
        tokens_generated=load.tokens_generated,
        other_store=load.other_store,
        other_key=load.other_key,
        pid=node.pid,
        store=load.store,
        restore_bytes_per_second=load.restore_bytes_per_second,
        temperature_celsius=load.temperature_celsius,
    )


def resident_messages(members: Iterable[Member], session_id: str) -> list[chat_pb2.ResidentRows]:
    """The nodes, those that are dead left out, that hold rows of a session."""
    nodes = [member.node for member in members if member.state is not NodeState.DEAD]
    return [
        chat_pb2.ResidentRows(node_id=node.node_id, n_tokens=node.resident[session_id])
        for node in nodes
        if session_id in node.resident
    ]


def node_of(request: fleet_pb2.RegisterRequest, store: WhichStore) -> Node:
    """``store``: the one we look at."""
    return Node(
        node_id=request.node_id,
        boot_id=request.boot_id,
        address=request.address,
        model=request.model,
        fingerprint=request.fingerprint,
        context_length=request.context_length,
        max_running=request.max_running,
        n_threads=request.n_threads,
        kernel_path=request.kernel_path,
        pid=request.pid,
        bytes_per_row=request.bytes_per_row or _f32_bytes_per_row(request.geometry),
        load=load_of(request.load, store),
        resident=resident_of(request.resident),
        sees_images=request.sees_images,
    )


def _f32_bytes_per_row(geometry: common_pb2.KvGeometry) -> int:
    """For nodes of a version that does not say it."""
    return geometry.n_layers * geometry.n_kv_heads * geometry.head_dim * 2 * 4


def load_of(load: worker_pb2.NodeLoad, store: WhichStore) -> Load:
    """``store``: the one we look at."""
    return Load(
        n_running=load.n_running,
        n_queued=load.n_queued,
        kv_bytes_used=load.kv_bytes_used,
        kv_bytes_budget=load.kv_bytes_budget,
        tokens_generated=load.tokens_generated,
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        decode_tokens_per_second=load.decode_tokens_per_second,
        restore_bytes_per_second=load.restore_bytes_per_second,
        store_ok=load.store_ok,
        other_store=differs(load.store_id, store.store_id),
        other_key=differs(load.store_seal, store.seal),
        stalled_seconds=load.stalled_seconds,
        store=load.store if load.HasField("store") else None,
        stall_limit_seconds=load.stall_limit_seconds,
        temperature_celsius=load.temperature_celsius if load.HasField("temperature_celsius") else None,
    )


def differs(told: str, ours: str) -> bool:
    """Whether both are known, and not the same."""
    return bool(told and ours and told != ours)


def resident_of(sessions: Iterable[worker_pb2.ResidentSession]) -> dict[str, int]:
    return {session.session_id: session.n_tokens for session in sessions}
