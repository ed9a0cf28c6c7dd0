"""A request becomes a turn's record: everything about it is worked out before it becomes durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvferry.coordinator.conversation import History
from kvferry.coordinator.errors import InvalidMessage, SessionBusy
from kvferry.coordinator.fleet import Fleet
from kvferry.coordinator.models import ServedModel
from kvferry.coordinator.registry import SessionRecord, TurnRecord
from kvferry.coordinator.requests import TurnRequest, answer_budget
from kvferry.coordinator.surroundings import Surroundings


async def new_record(
    around: Surroundings, session: SessionRecord, turns: Sequence[TurnRecord], model: ServedModel,
    request: TurnRequest, new_id: Callable[[], str],
) -> tuple[TurnRecord, History, Mapping[str, bytes]]:  # fmt: skip
    """The turn after these in its session, what it is appended to, and the pixels of its pictures by content hash.

    Raises SessionBusy, PromptTooLong, InvalidMessage, InvalidTools, InvalidFormat, FormatTooComplex, NoVision,
    InvalidImage, ImagesTooLarge.
    """
    if session.open_turn_id:
        raise SessionBusy(
            f"session {session.session_id} is answering turn {session.open_turn_id}: wait for it or cancel it"
        )
    check_kind(turns, request)
    if session.n_turns and request.messages and request.messages[0].role == "system":
        raise InvalidMessage(
            "only the first message of a session may have the role system; this session has begun already"
        )
    history = History.of(turns)
    prepared = await model.preparation.prepare(around.in_thread, request, turns, history)
    n_prompt_tokens = len(history.token_ids) + len(prepared.prompt_ids)
    if history.pictures or prepared.pictures:
        around.fleet.check_sight(model.name)
    now_ms, seconds = around.wall_ms(), request.call_seconds or request.timeout_s
    record = TurnRecord(
        session_id=request.session_id,
        turn_id=request.turn_id or new_id(),
        messages=request.messages,
        n_history_tokens=len(history.token_ids),
        prompt_ids=prepared.prompt_ids,
        sampling=request.sampling.SerializeToString(deterministic=True),
        max_tokens=answer_budget(n_prompt_tokens, request.max_tokens, contexts(around.fleet, model)),
        stop=request.stop,
        digest=request.digest,
        created_at_ms=now_ms,
        form=prepared.form,
        pictures=prepared.pictures,
        priority=request.priority,
        deadline_ms=now_ms + int(seconds * 1000) if seconds else 0,
        n_samples=request.n_samples,
    )
    return record, history, prepared.pixels


def check_kind(turns: Sequence[TurnRecord], request: TurnRequest) -> None:
    """Raises InvalidMessage for messages after raw prompts, which no template can show, and for the reverse."""
    kept = [turn for turn in turns if turn.outcome is not None and turn.outcome.kept]
    if kept and bool(kept[0].messages) != bool(request.messages):
        has, given = ("messages", "a raw_prompt") if kept[0].messages else ("raw prompts", "messages")
        raise InvalidMessage(f"the session's turns have {has}, and this one has {given}: begin a new session")


def contexts(fleet: Fleet, model: ServedModel) -> Sequence[int]:
    """How many tokens each of the model's nodes holds, or, with no node, the model itself."""
    nodes = fleet.serving(model.name)
    return [min(node.context_length, model.context_length) for node in nodes] or [model.context_length]
