"""Between protobuf messages and the SDK's values; those of tools and forms are in form_wire.py, of the fleet in
fleet_wire.py, of the store in stored.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as WireMessage

from kvferry.client.errors import InvalidImport, InvalidRequest, InvalidSampling, RequestTooLarge
from kvferry.client.sdk.events import (
    Candidate,
    Finished,
    FinishReason,
    NodeLost,
    Placed,
    PrefixReport,
    Started,
    Token,
    TokenLogprob,
)
from kvferry.client.sdk.filling import request_of
from kvferry.client.sdk.form_wire import answer_of, call_of, call_to_wire, form_to_wire, parts_of, raw_prompt_to_wire
from kvferry.client.sdk.forms import FREE, AnswerForm
from kvferry.client.sdk.values import (
    ExportedSession,
    Image,
    Message,
    RawPrompt,
    Sampling,
    SessionDetails,
    SessionInfo,
    TurnInfo,
    TurnState,
)
from kvferry.proto.channel import MAX_MESSAGE_BYTES
from kvferry.proto.v1 import chat_pb2, common_pb2

ServerEvent = Started | Placed | Token | NodeLost | Finished

_FINISH_REASONS: Final = {
    common_pb2.FINISH_REASON_END: FinishReason.END,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
    common_pb2.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
}
_TURN_STATES: Final = {
    chat_pb2.TURN_STATE_WAITING: TurnState.WAITING,
    chat_pb2.TURN_STATE_RUNNING: TurnState.RUNNING,
    chat_pb2.TURN_STATE_FINISHED: TurnState.FINISHED,
}


def event_of(message: chat_pb2.TurnEvent) -> ServerEvent | None:
    """The event, or None for a kind that is newer than this client."""
    match message.WhichOneof("event"):
        case "started":
            return Started(message.started.n_prompt_tokens, message.started.n_history_tokens)
        case "placed":
            return placed_of(message.placed)
        case "token":
            return _token_of(message.sequence, message.token)
        case "node_lost":
            lost = message.node_lost
            return NodeLost(lost.node_id, lost.cause, lost.detail, message.sequence)
        case "finished":
            return _finished_of(message.finished)
        case _:
            return None


def _token_of(sequence: int, message: chat_pb2.TokenEvent) -> Token:
    content, reasoning, calls = (message.text, "", ()) if message.is_content else parts_of(message.parts)
    return Token(
        sequence=sequence,
        token_id=message.token_id,
        text=message.text,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(TokenLogprob(t.token_id, t.logprob, t.text, t.token_bytes) for t in message.top_logprobs),
        content=content,
        reasoning=reasoning,
        tool_calls=calls,
        token_bytes=message.token_bytes,
    )


def _finished_of(message: chat_pb2.TurnFinished) -> Finished:
    content, reasoning, calls = parts_of(message.tail_parts)
    return Finished(
        reason=_FINISH_REASONS.get(message.reason, FinishReason.UNKNOWN),
        n_prompt_tokens=message.n_prompt_tokens,
        n_answer_tokens=message.n_answer_tokens,
        tail_text=message.tail_text,
        first_token_seconds=message.first_token_seconds,
        total_seconds=message.total_seconds,
        longest_pause_seconds=message.longest_pause_seconds,
        n_placements=message.n_placements,
        error_code=message.error_code,
        error=message.error,
        answer=answer_of(message.answer) if message.HasField("answer") else None,
        tail_content=content,
        tail_reasoning=reasoning,
        tail_calls=calls,
    )


def placed_of(message: chat_pb2.Placement) -> Placed:
    """A placement with its candidates and, once known, its prefix report."""
    return Placed(
        node_id=message.node_id,
        epoch=message.epoch,
        first_index=message.first_index,
        candidates=tuple(
            Candidate(
                c.node_id,
                c.chosen,
                c.n_resident,
                c.n_stored,
                c.n_running,
                c.n_queued,
                c.reason,
                c.queue_seconds,
                c.restore_seconds,
                c.prefill_seconds,
                c.predicted_seconds,
                c.n_restored,
                c.n_computed,
                c.others_seconds,
                c.look_seconds,
            )
            for c in message.candidates
        ),
        prefix=_prefix_of(message.prefix) if message.HasField("prefix") else None,
        predicted_seconds=message.predicted_seconds,
        first_token_seconds=message.first_token_seconds,
        n_candidates=message.n_candidates,
    )


def _prefix_of(message: common_pb2.PrefixReport) -> PrefixReport:
    return PrefixReport(
        n_tokens=message.n_tokens,
        n_resident=message.n_resident,
        n_restored=message.n_restored,
        n_computed=message.n_computed,
        queue_seconds=message.queue_seconds,
        restore_seconds=message.restore_seconds,
        prefill_seconds=message.prefill_seconds,
        snapshot=message.snapshot,
        refused_snapshots=tuple(message.refused_snapshots),
    )


def generate_request(
    session_id: str,
    turn_id: str,
    *,
    messages: str | Sequence[Message] | RawPrompt,
    images: Sequence[Image | bytes],
    sampling: Sampling,
    max_tokens: int,
    stop: Sequence[str],
    form: AnswerForm = FREE,
    priority: int = 0,
    timeout_s: float = 0.0,
    n_samples: int = 0,
) -> chat_pb2.GenerateRequest:
    """A turn's request; a plain text is one message of the user, with the images.

    Raises InvalidRequest, InvalidSampling, InvalidTools, InvalidFormat.
    """
    if isinstance(messages, str):
        messages = (Message("user", messages, tuple(i if isinstance(i, Image) else Image(i) for i in images)),)
    elif images:
        raise InvalidRequest("images go with a text; with messages, give each image to its own message.")
    raw, messages = (messages, ()) if isinstance(messages, RawPrompt) else (None, messages)
    if isinstance(stop, str):
        stop = (stop,)
    request = request_of(
        chat_pb2.GenerateRequest,
        session_id=session_id,
        turn_id=turn_id,
        messages=[message_to_wire(message) for message in messages],
        sampling=sampling_to_wire(sampling),
        max_tokens=max_tokens,
        stop=stop,
        priority=priority,
        timeout_seconds=timeout_s,
        n_samples=n_samples,
        raw_prompt=None if raw is None else raw_prompt_to_wire(raw),
        **form_to_wire(form),
    )
    check_size(request)
    return request


def message_to_wire(message: Message) -> chat_pb2.ChatMessage:
    """Raises InvalidRequest."""
    for image in message.images:
        if not isinstance(image.data, bytes):
            raise InvalidRequest(f"an image's data cannot be {type(image.data).__name__}: it is the bytes of a file.")
    images = [request_of(chat_pb2.Image, data=image.data, at=image.at) for image in message.images]
    return request_of(
        chat_pb2.ChatMessage,
        role=message.role,
        content=message.content,
        images=images,
        reasoning=message.reasoning,
        tool_calls=[call_to_wire(call) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
    )


def sampling_to_wire(sampling: Sampling) -> common_pb2.SamplingSettings:
    """Only the fields that are set. Raises InvalidSampling for what the message cannot hold; the server checks more."""
    given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return request_of(common_pb2.SamplingSettings, InvalidSampling, **given)


def check_size(request: WireMessage) -> None:
    """Raises RequestTooLarge for what the coordinator would not read; it would say so less clearly."""
    n_bytes = request.ByteSize()
    if n_bytes > MAX_MESSAGE_BYTES:
        raise RequestTooLarge(
            f"The request has {n_bytes:,} bytes; one request may have {MAX_MESSAGE_BYTES:,} ({MAX_MESSAGE_BYTES >> 20} "
            "MiB). Send a shorter message, smaller images, or several turns."
        )


def session_of(message: chat_pb2.Session) -> SessionInfo:
    """A session's head."""
    return SessionInfo(
        session_id=message.session_id,
        model=message.model,
        created_at_ms=message.created_at_ms,
        updated_at_ms=message.updated_at_ms,
        n_tokens=message.n_tokens,
        n_turns=message.n_turns,
        epoch=message.epoch,
        open_turn_id=message.open_turn_id,
        forked_from=message.forked_from,
        last_node_id=message.last_node_id,
        tenant=message.tenant,
        expires_after_s=message.expires_after_seconds,
    )


def session_details_of(message: chat_pb2.GetSessionResponse) -> SessionDetails:
    """A session with all its turns."""
    return SessionDetails(
        session=session_of(message.session),
        turns=tuple(_turn_of(turn) for turn in message.turns),
        token_ids=tuple(message.token_ids),
    )


def _message_of(message: chat_pb2.ChatMessage) -> Message:
    images = (Image(b"", i.at, i.content_hash, i.width, i.height, i.n_tokens, i.start) for i in message.images)
    return Message(
        message.role,
        message.content,
        tuple(images),
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        tool_calls=tuple(call_of(call) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _turn_of(message: chat_pb2.Turn) -> TurnInfo:
    return TurnInfo(
        turn_id=message.turn_id,
        state=_TURN_STATES.get(message.state, TurnState.UNKNOWN),
        messages=tuple(_message_of(m) for m in message.messages),
        answer=message.answer,
        finish_reason=_FINISH_REASONS.get(message.finish_reason, FinishReason.UNKNOWN),
        n_prompt_tokens=message.n_prompt_tokens,
        n_answer_tokens=message.n_answer_tokens,
        placements=tuple(placed_of(p) for p in message.placements),
        parsed=answer_of(message.parsed) if message.HasField("parsed") else None,
    )


def exported_of(message: chat_pb2.ExportedSession) -> ExportedSession:
    """A session for another cluster."""
    return ExportedSession(
        session_id=message.session_id,
        model=message.model,
        token_ids=tuple(i for turn in message.turns for ids in (turn.prompt_ids, turn.answer_ids) for i in ids),
        pictures=tuple((p.start, p.n_tokens, p.content_hash) for turn in message.turns for p in turn.pictures),
        data=message.SerializeToString(),
    )


def import_request(data: bytes, session_id: str) -> chat_pb2.ImportSessionRequest:
    """Raises InvalidImport for bytes that are no session, RequestTooLarge."""
    try:
        session = chat_pb2.ExportedSession.FromString(data)
    except DecodeError as error:
        raise InvalidImport("What is to be imported is no session that was exported.") from error
    request = request_of(chat_pb2.ImportSessionRequest, session=session, session_id=session_id)
    check_size(request)
    return request
