"""What a drill found, and whether its hypothesis held. Pure: what was seen in, figures and a verdict out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.client.sdk import ConnectionLost, NodeLost
from kvferry.drills.judge import Fault, Verdict, judge
from kvferry.drills.scenarios import COORDINATOR, STORE, Disturbance, Limits, Where
from kvferry.drills.stage import Conversation
from kvferry.drills.watch import Sight


class Ruling(StrEnum):
    """How a drill ended."""

    HELD = "held"
    BROKEN = "broken"
    SKIPPED = "skipped"  # this target cannot do what the scenario needs


@dataclass(frozen=True, slots=True)
class Strike:
    """An injection that was done: when (time.monotonic), to which parts, and how; `healed_at` None: it was not."""

    at: float
    what: Disturbance
    where: Where
    parts: tuple[str, ...]
    how: str
    healed_at: float | None = None


@dataclass(frozen=True, slots=True)
class LimitResult:
    """One limit: `measured` None when what it is about was never seen, which breaks it."""

    name: str
    unit: str
    limit: float
    measured: float | None
    held: bool


@dataclass
class Seen:
    """All that a drill saw of its disturbed conversations."""

    conversations: Sequence[Conversation]
    control: Sequence[Conversation]
    strikes: Sequence[Strike]
    sights: Sequence[Sight]
    bytes_restored: int
    files_refused: int
    whole_at: float | None
    saves_without_room: int = 0
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured. Seconds; None: never seen."""

    tokens_compared: int
    tokens_lost: int
    tokens_duplicated: int
    tokens_differing: int
    longest_pause_s: float
    undisturbed_pause_s: float
    detection_s: float | None
    recovery_s: float | None
    failovers: int
    connections_lost: int
    tokens_restored: int
    bytes_restored: int
    files_refused: int
    saves_without_room: int


def figures_of(seen: Seen) -> tuple[Figures, list[str]]:
    """The figures, and sentences about tokens that are not as they should be, conversations that failed included."""
    verdicts = [_compare(got, truth) for got, truth in zip(seen.conversations, seen.control, strict=True)]
    sentences = list(seen.findings)
    for conversation, verdict in zip(seen.conversations, verdicts, strict=True):
        who = f"conversation {conversation.number + 1}"
        sentences += [f"{who}: {finding.sentence}" for finding in verdict.findings]
        if conversation.error:
            sentences.append(f"{who} failed in turn {conversation.turn}: {conversation.error}")

    def total(fault: Fault) -> int:
        return sum(verdict.count(fault) for verdict in verdicts)

    placed = [p for c in seen.conversations for log in c.logs.values() for p in log.placements]
    figures = Figures(
        tokens_compared=sum(verdict.n_tokens_compared for verdict in verdicts),
        tokens_lost=total(Fault.LOST),
        tokens_duplicated=total(Fault.DUPLICATED) + total(Fault.REORDERED),
        tokens_differing=total(Fault.DIFFERING),
        longest_pause_s=_longest_wait(seen.conversations),
        undisturbed_pause_s=_longest_wait(seen.control),
        detection_s=detection_s(seen),
        recovery_s=_recovery_s(seen),
        failovers=sum(len(c.events(NodeLost)) for c in seen.conversations),
        connections_lost=sum(len(c.events(ConnectionLost)) for c in seen.conversations),
        tokens_restored=sum(p.prefix.n_restored for p in placed if p.prefix is not None),
        bytes_restored=seen.bytes_restored,
        files_refused=seen.files_refused,
        saves_without_room=seen.saves_without_room,
    )
    return figures, sentences


def detection_s(seen: Seen) -> float | None:
    """From the first strike until a client was told that a struck part was left; where none had to be told, until
    the coordinator's list of nodes showed it."""
    if not seen.strikes:
        return None
    first = seen.strikes[0]
    parts = set(first.parts)
    told = [
        at
        for conversation in seen.conversations
        for at, event in [*conversation.events(NodeLost), *conversation.events(ConnectionLost)]
        if (event.node_id if isinstance(event, NodeLost) else COORDINATOR) in parts
    ]
    shown = [
        sight.at
        for sight in seen.sights
        if (sight.node_id in parts and not sight.is_well) or (STORE in parts and not sight.store_ok)
    ]
    after = [[at - first.at for at in times if at >= first.at] for times in (told, shown)]
    return min(after[0] or after[1], default=None)


def hold_to(limits: Limits, figures: Figures) -> list[LimitResult]:
    """Each limit that the scenario has. The tokens come first: they are never up for discussion."""
    results = [
        LimitResult(name, "tokens", 0, number, number == 0)
        for name, number in (
            ("tokens lost", figures.tokens_lost),
            ("tokens duplicated", figures.tokens_duplicated),
            ("tokens differing", figures.tokens_differing),
        )
    ]
    results.append(_at_most("longest pause", "s", limits.longest_pause_s, figures.longest_pause_s))
    if limits.detection_s is not None:
        results.append(_at_most("detection", "s", limits.detection_s, figures.detection_s))
    results.append(_at_most("recovery", "s", limits.recovery_s, figures.recovery_s))
    if limits.failovers_at_least:
        results.append(_at_least("failovers", "", limits.failovers_at_least, figures.failovers))
    if limits.failovers_at_most is not None:
        results.append(_at_most("failovers", "", limits.failovers_at_most, figures.failovers))
    if limits.refused_files_at_least:
        results.append(_at_least("refused files", "files", limits.refused_files_at_least, figures.files_refused))
    if limits.failed_saves_at_least:
        results.append(_at_least("saves without room", "", limits.failed_saves_at_least, figures.saves_without_room))
    return results


def ruling_of(results: Sequence[LimitResult], figures: Figures, sentences: Sequence[str]) -> Ruling:
    """Held when every limit held, nothing else was found, and something was compared."""
    is_good = all(result.held for result in results) and not sentences and figures.tokens_compared > 0
    return Ruling.HELD if is_good else Ruling.BROKEN


def _compare(got: Conversation, truth: Conversation) -> Verdict:
    stored = (got.token_ids, truth.token_ids) if got.token_ids else (None, None)
    return judge(got.records, truth.records, *stored)


def _longest_wait(conversations: Sequence[Conversation]) -> float:
    return max((to - since for c in conversations for since, to in c.waits), default=0.0)


def _recovery_s(seen: Seen) -> float | None:
    healed = [strike.healed_at for strike in seen.strikes if strike.healed_at is not None]
    if seen.whole_at is None or not healed:
        return None
    return max(0.0, seen.whole_at - max(healed))


def _at_most(name: str, unit: str, limit: float, measured: float | None) -> LimitResult:
    return LimitResult(f"{name} at most", unit, limit, measured, measured is not None and measured <= limit)


def _at_least(name: str, unit: str, limit: float, measured: float) -> LimitResult:
    return LimitResult(f"{name} at least", unit, limit, measured, measured >= limit)
