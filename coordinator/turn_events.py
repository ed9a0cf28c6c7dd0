"""A turn's events: how each is made, and how all of them are made again from a finished turn's record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvferry.coordinator.answer_parts import PartsReader, parsed, parsed_message
from kvferry.coordinator.registry import TurnOutcome, TurnRecord
from kvferry.proto.v1 import chat_pb2, common_pb2, worker_pb2


class AnswerText(Protocol):
    """Token ids in, text out; holds back half characters and what may begin a stop string."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_token_ids(self) -> Sequence[int]: ...

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that this token completed, and whether a stop string is complete."""

    def flush(self) -> str:
        """What was held back, when nothing follows."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token alone stands for, maybe a part of a character."""


def replay(record: TurnRecord, placements: Iterable[chat_pb2.Placement], text: AnswerText) -> list[chat_pb2.TurnEvent]:
    """The events of a finished turn, made again from its record (without the nodes that were lost)."""
    if record.outcome is None:
        raise AssertionError("replay of an open turn")
    events = [stamp(chat_pb2.TurnEvent(started=started(record)), record, 0, 0)]
    waiting = sorted(map(as_announced, placements), key=lambda p: (p.first_index, p.epoch))
    details = {t.index: t for t in worker_pb2.GeneratedTokens.FromString(record.outcome.logprobs).tokens}
    epoch = record.epoch
    reader = PartsReader(record)
    pieces: list[str] = []
    for index, token_id in enumerate(record.outcome.answer_ids.tolist()):
        while waiting and waiting[0].first_index <= index:
            epoch = waiting[0].epoch
            events.append(stamp(chat_pb2.TurnEvent(placed=waiting.pop(0)), record, epoch, index))
        piece = "" if token_id in text.end_token_ids else text.push(token_id)[0]
        pieces.append(piece)
        token = details.get(index) or common_pb2.GeneratedToken(index=index, token_id=token_id)
        made = token_event(token, piece, reader.push(piece), text)
        events.append(stamp(chat_pb2.TurnEvent(token=made), record, epoch, index))
    tail = record.outcome.answer_text[len("".join(pieces)) :]
    n_tokens = len(record.outcome.answer_ids)
    events.extend(stamp(chat_pb2.TurnEvent(placed=p), record, p.epoch, n_tokens) for p in waiting)
    end = finished(record, record.outcome, tail, reader.finish(tail))
    events.append(stamp(chat_pb2.TurnEvent(finished=end), record, record.epoch, n_tokens))
    return events


def as_announced(placement: chat_pb2.Placement) -> chat_pb2.Placement:
    """As readers were told of it: nobody knew then when its first token would come."""
    announced = chat_pb2.Placement()
    announced.CopyFrom(placement)
    announced.ClearField("first_token_seconds")
    return announced


def stamp(event: chat_pb2.TurnEvent, record: TurnRecord, epoch: int, sequence: int) -> chat_pb2.TurnEvent:
    event.session_id, event.turn_id, event.epoch, event.sequence = record.session_id, record.turn_id, epoch, sequence
    return event


def started(record: TurnRecord) -> chat_pb2.TurnStarted:
    return chat_pb2.TurnStarted(n_prompt_tokens=record.n_prompt_tokens, n_history_tokens=record.n_history_tokens)


def token_event(
    token: common_pb2.GeneratedToken, piece: str, parts: Sequence[chat_pb2.AnswerPart], text: AnswerText
) -> chat_pb2.TokenEvent:
    event = chat_pb2.TokenEvent(token_id=token.token_id, text=piece)
    if len(parts) == 1 and parts[0].content == piece:
        event.is_content = True  # as nearly all are: not said twice
    else:
        event.parts.extend(parts)
    if token.HasField("logprob"):
        event.logprob = token.logprob
        event.token_bytes = text.token_bytes(token.token_id)
        event.top_logprobs.extend(alternative(other, text.token_bytes(other.token_id)) for other in token.top_logprobs)
    return event


def alternative(token: common_pb2.TokenLogprob, token_bytes: bytes) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token_id=token.token_id,
        logprob=token.logprob,
        text=token_bytes.decode("utf-8", "replace"),
        token_bytes=token_bytes,
    )


def finished(
    record: TurnRecord, outcome: TurnOutcome, tail: str, tail_parts: Sequence[chat_pb2.AnswerPart]
) -> chat_pb2.TurnFinished:
    return chat_pb2.TurnFinished(
        reason=common_pb2.FinishReason.ValueType(outcome.reason),
        n_prompt_tokens=record.n_prompt_tokens,
        n_answer_tokens=len(outcome.answer_ids),
        tail_text=tail,
        first_token_seconds=outcome.first_token_seconds,
        total_seconds=outcome.total_seconds,
        longest_pause_seconds=outcome.longest_pause_seconds,
        n_placements=outcome.n_placements,
        error_code=outcome.error_code,
        error=outcome.error,
        answer=parsed_message(parsed(record, outcome.answer_text)),
        tail_parts=tail_parts,
    )
