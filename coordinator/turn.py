"""One turn as a state machine, without I/O and without a clock.

Two rules: everything that affects a turn's transitions lives in this file, and nothing in it knows where tokens come
from or who reads the events. The caller owns sockets, durability and time.

    waiting ──place──▶ running ──last token──▶ ending ──close──▶ finished
       ▲                  │                       ▲
       └──────lose────────┘      cancel, deadline, or too many losses: from waiting or running

*waiting*: no node has it. *running*: a node has it, under an epoch. *ending*: the outcome is known, not durable yet.
*finished*: the outcome is durable; only now do subscribers hear of it.

Tokens are numbered by their index in the answer. A token of another epoch or with an index that was seen is dropped;
a gap is the node's mistake and loses the placement. So whatever nodes send, ``answer_ids`` grows by the next index
only, and (session, turn, index) names one token for ever.

``events`` only grows; any number of subscribers read it, each with an index of its own.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvferry.coordinator.answer_parts import PartsReader
from kvferry.coordinator.registry import FinishReason, TurnOutcome, TurnRecord
from kvferry.coordinator.routing import RouteRequest
from kvferry.coordinator.turn_events import AnswerText, finished, stamp, started, token_event
from kvferry.proto.v1 import chat_pb2, common_pb2, worker_pb2


class Phase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.ENDING}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class Blame(enum.Enum):
    """Whom a lost placement speaks against; each has its own limit in ``TurnPolicy``."""

    # The node died, hung or broke the protocol while it had the turn; if every node does, it is the turn.
    TURN = "turn"
    # The node has no room now; if it never has, the turn is too big.
    CAPACITY = "capacity"
    # The node drains, starts, cannot be reached: nothing to do with this turn.
    NODE = "node"


BRIEF_PLACEMENT_SECONDS: Final = 2.0
"""A placement that was lost before this and brought nothing counts as waiting: longer than any connection attempt."""


MIN_FIRST_TOKEN_SECONDS: Final = 1e-6
"""A placement that brought a token is told from one that did not by the span being above 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a placement ended before the answer did. ``cause`` is one of those named in chat.proto's NodeLost."""

    cause: str
    detail: str
    blame: Blame
    # What the turn fails with, if losses like this one exhaust it.
    code: str = "placements_exhausted"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnPolicy:
    """Limits on placements that brought no new token."""

    # A turn that took down three nodes is not given a fourth (reliability.md section 5: at most three placements).
    max_losses: int = 3
    # With the pauses below: about four minutes of nodes without room.
    max_capacity_refusals: int = 100
    # This many failures in a row, then a pause, so that a fleet in trouble is not hammered.
    max_placements: int = 3
    # The first pause; each further one is twice as long, up to the maximum: a turn may wait for days.
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 8.0


class Turn:
    """See the module's docstring. ``now_s``: seconds of a clock that does not jump, the same one in all calls."""

    def __init__(
        self, record: TurnRecord, text: AnswerText, policy: TurnPolicy, now_s: float, *, resumed: bool
    ) -> None:
        self.record = record
        self.phase = Phase.WAITING
        self.epoch = record.epoch
        self.fingerprint = record.fingerprint
        self.node_id = ""
        self.answer_ids: list[int] = []
        self.events: list[chat_pb2.TurnEvent] = []
        self.placements: list[chat_pb2.Placement] = []
        # Since when no node has worked on it, as far as a reader can tell.
        self.waiting_since_s = now_s
        # Since when the latest node has it.
        self.placed_s = now_s
        # Not before this time may the turn be placed again.
        self.next_try_s = now_s
        self.outcome: TurnOutcome | None = None
        self.n_dropped = 0
        self.failed: dict[str, str] = {}
        self._text = text
        self._parts = PartsReader(record)
        self._policy = policy
        # Another process may have delivered tokens under the record's fingerprint.
        self._fingerprint_is_fixed = resumed and bool(record.fingerprint)
        self._pieces: list[str] = []
        self._with_logprobs: list[common_pb2.GeneratedToken] = []
        self._placed_announced = True
        self._n_without_token = dict.fromkeys(Blame, 0)
        self._n_failures = 0
        self._n_pauses = 0
        self._began_s = now_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._lost_since_token = False
        self._longest_pause_s = 0.0
        self._tail = ""
        self.events.append(stamp(chat_pb2.TurnEvent(started=started(record)), record, 0, 0))  # no node has it yet

    # What the shell asks.

    @property
    def is_over(self) -> bool:
        return self.phase in {Phase.ENDING, Phase.FINISHED}

    @property
    def has_first_token(self) -> bool:
        """Whether the latest placement has brought one."""
        return bool(self.placements) and self.placements[-1].first_token_seconds > 0

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last so far."""
        return (
            0.0
            if self._first_token_s is None or self._last_token_s is None
            else (self._last_token_s - self._first_token_s)
        )

    def route_request(self) -> RouteRequest:
        """What this turn needs of a node now."""
        record = self.record
        return RouteRequest(
            session_id=record.session_id,
            n_tokens=record.n_prompt_tokens + len(self.answer_ids),
            n_context=record.n_prompt_tokens + record.max_tokens,
            fingerprint=self.fingerprint if self.answer_ids or self._fingerprint_is_fixed else "",
            failed=dict(self.failed),
        )

    # What happens to a turn.

    def place(
        self, node_id: str, fingerprint: str, epoch: int, candidates: Iterable[chat_pb2.CandidateNode], now_s: float,
        *, predicted_s: float = 0.0, n_candidates: int = 0,
    ) -> None:  # fmt: skip
        """A node has it from now on, under an epoch that is durable."""
        if epoch <= self.epoch:
            raise AssertionError(f"epoch {epoch} after {self.epoch}")
        self._go(Phase.RUNNING)
        self.node_id, self.fingerprint, self.epoch = node_id, fingerprint, epoch
        placement = chat_pb2.Placement(
            node_id=node_id, epoch=epoch, first_index=len(self.answer_ids), candidates=candidates,
            predicted_seconds=predicted_s, n_candidates=n_candidates,
        )  # fmt: skip
        self.placements.append(placement)
        self._placed_announced = False
        self.placed_s = now_s

    def report_prefix(self, epoch: int, prefix: common_pb2.PrefixReport) -> None:
        """The node says where the rows of the prompt came from."""
        if self.phase is Phase.RUNNING and epoch == self.epoch and not self._placed_announced:
            self.placements[-1].prefix.CopyFrom(prefix)
            self._announce_placement()

    def receive(self, epoch: int, tokens: Iterable[common_pb2.GeneratedToken], now_s: float) -> None:
        """Tokens from a node; each is the next one, or dropped, or a reason to leave the node."""
        for token in tokens:
            expected = len(self.answer_ids)
            if self.phase is not Phase.RUNNING or epoch != self.epoch or token.index < expected:
                self.n_dropped += 1
            elif token.index > expected:
                self._break_protocol(f"sent token {token.index} where {expected} was next", now_s)
            elif not 0 <= token.token_id < self._text.vocab_size:
                self._break_protocol(f"sent token id {token.token_id}, outside the vocabulary", now_s)
            else:
                self._accept(token, now_s)

    def run_ended(self, epoch: int, reason: int, now_s: float) -> None:
        """The node says that the answer is complete. This side knows it first: from the tokens alone."""
        if self.phase is Phase.RUNNING and epoch == self.epoch:
            name = common_pb2.FinishReason.Name(common_pb2.FinishReason.ValueType(reason))
            self._break_protocol(f"ended the answer at token {len(self.answer_ids)} with {name}", now_s)

    def lose(self, epoch: int, loss: Loss, now_s: float) -> None:
        """The placement of ``epoch`` is over and the answer is not; a late message about an older one is ignored."""
        if self.phase is not Phase.RUNNING or epoch != self.epoch:
            return
        took_it = self._placed_announced or now_s - self.placed_s >= BRIEF_PLACEMENT_SECONDS
        self._announce_placement()
        lost = chat_pb2.NodeLost(node_id=self.node_id, cause=loss.cause, detail=loss.detail)
        self._add(chat_pb2.TurnEvent(node_lost=lost), sequence=len(self.answer_ids))
        # Each node may be busy with itself once before the turn pauses; a fleet in a rolling upgrade is not in trouble.
        self._n_failures += loss.blame is not Blame.NODE or self.node_id in self.failed
        self.failed.pop(self.node_id, None)
        self.failed[self.node_id] = f"{loss.cause}, {loss.detail}"
        self._lost_since_token = True
        self._n_without_token[loss.blame] += 1
        if self._exhausted(loss.blame):
            n = self._n_without_token[loss.blame]
            sentence = (
                f"gave up after {n} placements without a new token, the last on {self.node_id}: {loss.detail}; "
                "the session is intact"
            )
            self.fail(loss.code, sentence, now_s)
            return
        self._go(Phase.WAITING)
        if took_it:
            self.waiting_since_s = now_s
        if self._n_failures >= self._policy.max_placements:
            pause_s = self._policy.backoff_seconds * 2.0 ** min(self._n_pauses, 32)
            self.next_try_s = now_s + min(pause_s, self._policy.max_backoff_seconds)
            self._n_failures = 0
            self._n_pauses += 1

    def hurry(self, now_s: float) -> None:
        """A node came back: the pause, meant for a fleet in trouble, is over."""
        if self.phase is Phase.WAITING:
            self.next_try_s = min(self.next_try_s, now_s)

    def cancel(self, now_s: float) -> None:
        """Somebody wants no more of it; the tokens so far stay. No effect when it is over."""
        if not self.is_over:
            self._end(FinishReason.CANCELLED, now_s)

    def expire(self, now_s: float) -> None:
        """Its deadline is here; the tokens so far stay. No effect when it is over."""
        if not self.is_over:
            self._end(FinishReason.DEADLINE, now_s)

    def fail(self, code: str, error: str, now_s: float) -> None:
        """It cannot be answered; the session goes on without this turn. No effect when it is over."""
        if not self.is_over:
            self._end(FinishReason.ERROR, now_s, code, error)

    def close(self) -> None:
        """The outcome is durable: tell the subscribers."""
        if self.outcome is None:
            raise AssertionError("closed before it ended")
        self._go(Phase.FINISHED)
        end = finished(self.record, self.outcome, self._tail, self._parts.finish(self._tail))
        self._add(chat_pb2.TurnEvent(finished=end), sequence=len(self.answer_ids))

    # How it does it.

    def _accept(self, token: common_pb2.GeneratedToken, now_s: float) -> None:
        self._announce_placement()
        text, stopped = self._push_text(token.token_id)
        self.answer_ids.append(token.token_id)
        self._pieces.append(text)
        if token.HasField("logprob"):
            self._with_logprobs.append(token)
        event = token_event(token, text, self._parts.push(text), self._text)
        self._add(chat_pb2.TurnEvent(token=event), sequence=token.index)
        self._note_progress(now_s)
        if stopped:
            self._end(FinishReason.STOP_STRING, now_s)
        elif token.token_id in self._text.end_token_ids:
            self._end(FinishReason.END, now_s)
        elif len(self.answer_ids) >= self.record.max_tokens:
            self._end(FinishReason.LENGTH, now_s)

    def _push_text(self, token_id: int) -> tuple[str, bool]:
        return ("", False) if token_id in self._text.end_token_ids else self._text.push(token_id)

    def _note_progress(self, now_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = now_s
        if not self.placements[-1].first_token_seconds:
            self.placements[-1].first_token_seconds = max(now_s - self.placed_s, MIN_FIRST_TOKEN_SECONDS)
        if self._lost_since_token and self._last_token_s is not None:
            self._longest_pause_s = max(self._longest_pause_s, now_s - self._last_token_s)
        self._last_token_s = now_s
        self._lost_since_token = False
        self._n_without_token = dict.fromkeys(Blame, 0)
        self._n_failures = 0
        self._n_pauses = 0
        self.failed.clear()

    def _exhausted(self, blame: Blame) -> bool:
        limits = {Blame.TURN: self._policy.max_losses, Blame.CAPACITY: self._policy.max_capacity_refusals}
        return blame in limits and self._n_without_token[blame] >= limits[blame]

    def _break_protocol(self, what: str, now_s: float) -> None:
        self.lose(self.epoch, Loss(cause="refused", detail=f"the node {what}", blame=Blame.TURN), now_s)

    def _end(self, reason: FinishReason, now_s: float, code: str = "", error: str = "") -> None:
        self._announce_placement()
        self._go(Phase.ENDING)
        self._tail = "" if reason is FinishReason.STOP_STRING else self._text.flush()
        self.outcome = TurnOutcome(
            reason=reason,
            answer_ids=np.array(self.answer_ids, dtype=np.int32),
            answer_text="".join(self._pieces) + self._tail,
            logprobs=worker_pb2.GeneratedTokens(tokens=self._with_logprobs).SerializeToString(),
            error_code=code,
            error=error,
            first_token_seconds=0.0 if self._first_token_s is None else self._first_token_s - self._began_s,
            total_seconds=now_s - self._began_s,
            longest_pause_seconds=self._longest_pause_s,
            n_placements=len(self.placements),
        )

    def _announce_placement(self) -> None:
        """Once per placement, before anything else that comes of it."""
        if not self._placed_announced:
            self._placed_announced = True
            self._add(chat_pb2.TurnEvent(placed=self.placements[-1]), sequence=len(self.answer_ids))

    def _add(self, event: chat_pb2.TurnEvent, sequence: int) -> None:
        self.events.append(stamp(event, self.record, self.epoch, sequence))

    def _go(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self!r} cannot become {phase.value}")
        self.phase = phase

    def __repr__(self) -> str:
        where = f" on {self.node_id}" if self.phase is Phase.RUNNING else ""
        return (
            f"<Turn {self.record.session_id}/{self.record.turn_id} {self.phase.value}{where} epoch={self.epoch} "
            f"tokens={len(self.answer_ids)} events={len(self.events)}>"
        )
