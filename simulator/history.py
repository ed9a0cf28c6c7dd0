"""What clients saw and what the registry kept, and whether the two agree with an undisturbed world. Pure."""

from __future__ import annotations

import dataclasses
import zlib

from kvferry.coordinator.memory_registry import Ledger
from kvferry.coordinator.registry import FinishReason, TurnRecord
from kvferry.proto.v1 import common_pb2
from kvferry.simulator.text import undisturbed_answer

ALLOWED_ERRORS = frozenset({"placements_exhausted", "queue_full", "out_of_kv_memory"})
"""A turn may end so; the session goes on without it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One token as one reader got it."""

    reader: int
    session_id: str
    turn_id: str
    index: int
    token_id: int
    epoch: int
    at_s: float


@dataclasses.dataclass(slots=True)
class History:
    """Grows while the cluster runs."""

    tokens: list[Seen] = dataclasses.field(default_factory=list)
    # reader → index it asked to begin at
    began_at: dict[int, int] = dataclasses.field(default_factory=dict)
    # (session, turn) → what the last reader was told at the end, and how many tokens
    finished: dict[tuple[str, str], tuple[FinishReason, int]] = dataclasses.field(default_factory=dict)
    begun: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)

    def forget(self, session_id: str) -> None:
        """It was deleted: its turns need not be there any more."""
        self.begun = [key for key in self.begun if key[0] != session_id]

    def fingerprint(self) -> int:
        """Equal for equal runs."""
        return zlib.crc32(repr(([dataclasses.astuple(t) for t in self.tokens], self.begun)).encode())


def check(history: History, ledger: Ledger) -> list[str]:
    """Every way in which the promises were broken (reliability.md, promise 13); empty when none was."""
    problems = [*history.violations, *check_readers(history), *check_epochs(history), *check_begun(history, ledger)]
    for session_id, turns in ledger.turns.items():
        problems += check_session(session_id, turns, ledger, history)
    return problems


def check_readers(history: History) -> list[str]:
    """Each reader gets each index once, in order, from where it asked; the epoch never goes back."""
    problems: list[str] = []
    next_index, epochs = dict(history.began_at), dict[int, int]()
    for seen in history.tokens:
        expected = next_index[seen.reader]
        if seen.index != expected:
            kind = "twice" if seen.index < expected else "with a gap"
            problems.append(f"{seen.session_id}/{seen.turn_id}: token {seen.index} came {kind}, {expected} was next")
        next_index[seen.reader] = seen.index + 1
        if seen.epoch < epochs.get(seen.reader, 0):
            problems.append(f"{seen.session_id}/{seen.turn_id}: token {seen.index} of an older epoch, {seen.epoch}")
        epochs[seen.reader] = seen.epoch
    return problems


def check_epochs(history: History) -> list[str]:
    """Those of a session's name only grow from turn to turn, also when it was deleted and made anew."""
    problems: list[str] = []
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for seen in history.tokens:
        lowest, highest = spans.get((seen.session_id, seen.turn_id), (seen.epoch, seen.epoch))
        spans[seen.session_id, seen.turn_id] = min(lowest, seen.epoch), max(highest, seen.epoch)
    before: dict[str, int] = {}
    for (session_id, turn_id), (lowest, highest) in spans.items():
        if lowest <= before.get(session_id, 0):
            problems.append(f"{session_id}/{turn_id}: epoch {lowest} came after {before.get(session_id, 0)}")
        before[session_id] = highest
    return problems


def check_begun(history: History, ledger: Ledger) -> list[str]:
    """An acknowledged turn is never lost."""
    kept = {(s, t.turn_id) for s, turns in ledger.turns.items() for t in turns}
    return [f"{s}/{t}: acknowledged and lost" for s, t in history.begun if (s, t) not in kept]


def check_session(session_id: str, turns: list[TurnRecord], ledger: Ledger, history: History) -> list[str]:
    """Its answers are those of an undisturbed world, and what readers got is what was kept."""
    problems: list[str] = []
    tokens: list[int] = []
    for turn in turns:
        name = f"{session_id}/{turn.turn_id}"
        if turn.outcome is None:
            problems.append(f"{name}: still open long after the last fault")
            continue
        prompt = [*tokens, *turn.prompt_ids.tolist()]
        if len(tokens) != turn.n_history_tokens:
            problems.append(f"{name}: began with {turn.n_history_tokens} tokens, the session had {len(tokens)}")
        seed = common_pb2.SamplingSettings.FromString(turn.sampling).seed
        expected = undisturbed_answer(prompt, seed, turn.max_tokens)
        answer = turn.outcome.answer_ids.tolist()
        complete = turn.outcome.reason in {FinishReason.END, FinishReason.LENGTH}
        if answer != (expected if complete else expected[: len(answer)]):
            problems.append(f"{name}: the answer kept is {answer}, undisturbed it is {expected}")
        if turn.outcome.reason is FinishReason.ERROR and turn.outcome.error_code not in ALLOWED_ERRORS:
            problems.append(f"{name}: ended with {turn.outcome.error_code}: {turn.outcome.error}")
        # a turn cut short after a restart keeps fewer tokens than an earlier reader may have got, never others
        problems += check_seen(name, (session_id, turn.turn_id), answer if complete else expected, history)
        told = history.finished.get((session_id, turn.turn_id), (turn.outcome.reason, len(answer)))
        if told != (turn.outcome.reason, len(answer)):
            problems.append(f"{name}: readers were told {told}, kept is {(turn.outcome.reason, len(answer))}")
        if turn.outcome.kept:
            tokens = [*prompt, *answer]
    if ledger.sessions[session_id].n_tokens != len(tokens):
        problems.append(
            f"{session_id}: says {ledger.sessions[session_id].n_tokens} tokens, its turns have {len(tokens)}"
        )
    return problems


def check_seen(name: str, key: tuple[str, str], answer: list[int], history: History) -> list[str]:
    """(session, turn, index) names one token for ever."""
    return [
        f"{name}: token {t.index} was {t.token_id} to a reader, and is {answer[t.index : t.index + 1]}"
        for t in history.tokens
        if (t.session_id, t.turn_id) == key and answer[t.index : t.index + 1] != [t.token_id]
    ]
