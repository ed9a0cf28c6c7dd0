"""A turn as a picture needs it: which node worked on it from when to when, and on what. Pure; no text of anybody.

A turn that is watched while it runs has the times at which its events came. Of one that was over before it was seen
only durations are known: its times are laid out backwards from its end.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from kvferry.client import Candidate, Finished, NodeLost, Placed, Started, Token, TurnEvent


@dataclass(slots=True)
class Stay:
    """One placement. Times in milliseconds since 1970; 0 while they are not known."""

    node_id: str
    first_index: int
    placed_ms: float
    queue_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    n_resident: int = 0
    n_restored: int = 0
    n_computed: int = 0
    predicted_ms: float = 0.0
    first_token_ms: float = 0.0  # at
    last_token_ms: float = 0.0  # at
    n_tokens: int = 0
    lost: str = ""  # why, when the node was
    candidates: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """One turn so far."""

    session_id: str
    turn_id: str
    began_ms: float
    n_prompt: int = 0
    n_history: int = 0
    stays: list[Stay] = field(default_factory=list)
    ended_ms: float = 0.0
    reason: str = ""
    n_tokens: int = 0
    longest_pause_ms: float = 0.0

    def push(self, event: TurnEvent, now_ms: float) -> None:
        """One event, as it comes."""
        match event:
            case Started():
                self.n_prompt, self.n_history = event.n_prompt_tokens, event.n_history_tokens
            case Placed():
                self._placed(event, now_ms)
            case Token() if self.stays:
                stay = self.stays[-1]
                stay.first_token_ms = stay.first_token_ms or now_ms
                stay.last_token_ms = now_ms
                stay.n_tokens += 1
                self.n_tokens = event.sequence + 1
            case NodeLost() if self.stays:
                self.stays[-1].lost = event.cause
            case Finished():
                self.ended_ms, self.reason = now_ms, str(event.reason)
                self.longest_pause_ms = event.longest_pause_seconds * 1000

    def _placed(self, event: Placed, now_ms: float) -> None:
        stay = Stay(event.node_id, event.first_index, now_ms, predicted_ms=event.predicted_seconds * 1000)
        stay.candidates = [_candidate(candidate) for candidate in event.candidates]
        prefix = event.prefix
        if prefix is not None:
            stay.queue_ms = prefix.queue_seconds * 1000
            stay.restore_ms = prefix.restore_seconds * 1000
            stay.prefill_ms = prefix.prefill_seconds * 1000
            stay.n_resident, stay.n_restored, stay.n_computed = prefix.n_resident, prefix.n_restored, prefix.n_computed
            stay.placed_ms -= stay.queue_ms + stay.restore_ms + stay.prefill_ms  # told with the first token
        self.stays.append(stay)

    def lay_out(self, finished: Finished, ended_ms: float) -> None:
        """Times for a turn that was over before it was seen: decoding fills what the rest leaves, token by token.

        Its record does not say why nodes were lost, only that others came after them.
        """
        for stay in self.stays[:-1]:
            stay.lost = stay.lost or "moved"
        self.ended_ms, self.began_ms = ended_ms, ended_ms - finished.total_seconds * 1000
        spent = sum(stay.queue_ms + stay.restore_ms + stay.prefill_ms for stay in self.stays)
        spent += self.longest_pause_ms
        decode_ms = max(finished.total_seconds * 1000 - spent, 0.0) / max(self.n_tokens, 1)
        at = self.began_ms
        for stay in self.stays:
            stay.placed_ms = at
            stay.first_token_ms = at + stay.queue_ms + stay.restore_ms + stay.prefill_ms
            stay.last_token_ms = at = stay.first_token_ms + decode_ms * stay.n_tokens
            at += self.longest_pause_ms if stay is self.stays[0] else 0.0

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return dataclasses.asdict(self)


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return dataclasses.asdict(candidate)
