"""Where a fork leaves its parent: between two turns, or at any token of an answer. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.coordinator.errors import IndexOutOfRange
from kvferry.coordinator.registry import FinishReason, TokenArray, TurnOutcome, TurnRecord
from kvferry.coordinator.turn_events import AnswerText
from kvferry.proto.v1 import worker_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Keep this many turns, the last of them with ``last_outcome`` in place of its own, if there is one."""

    n_turns: int
    last_outcome: TurnOutcome | None = None


def cut_at(turns: Sequence[TurnRecord], n_tokens: int, new_text: Callable[[TurnRecord], AnswerText]) -> Cut:
    """The fork with the first ``n_tokens`` tokens of the kept ``turns``.

    Raises IndexOutOfRange beyond the end, and inside a prompt: half a message is no message.
    """
    left, session_id = n_tokens, turns[0].session_id if turns else ""
    for number, turn in enumerate(turns):
        outcome = turn.outcome
        if outcome is None:
            raise AssertionError("an open turn is not kept")
        if left == 0:
            return Cut(number)
        if left <= len(turn.prompt_ids):
            before = n_tokens - left
            raise IndexOutOfRange(
                f"token {n_tokens} of session {session_id} lies inside the question of turn {turn.turn_id}: give "
                f"{before}, which is before it, or at least {before + len(turn.prompt_ids) + 1}, which is in its answer"
            )
        left -= len(turn.prompt_ids)
        if left < len(outcome.answer_ids):
            return Cut(number + 1, shortened(outcome, left, new_text(turn)))
        left -= len(outcome.answer_ids)
    if left:
        raise IndexOutOfRange(f"session {session_id} has {n_tokens - left} tokens in finished turns, not {n_tokens}")
    return Cut(len(turns))


def shortened(outcome: TurnOutcome, n_tokens: int, text: AnswerText) -> TurnOutcome:
    """The same answer as if somebody had cancelled it after ``n_tokens`` tokens."""
    answer_ids: TokenArray = np.array(outcome.answer_ids[:n_tokens], dtype=np.int32)
    pieces = [text.push(token_id)[0] for token_id in answer_ids.tolist()]
    logprobs = worker_pb2.GeneratedTokens.FromString(outcome.logprobs)
    kept = worker_pb2.GeneratedTokens(tokens=[token for token in logprobs.tokens if token.index < n_tokens])
    return dataclasses.replace(
        outcome,
        reason=FinishReason.CANCELLED,
        answer_ids=answer_ids,
        answer_text="".join(pieces) + text.flush(),
        logprobs=kept.SerializeToString(),
    )
