"""Compares a disturbed conversation with an undisturbed one, token by token. Pure: records in, verdict out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class ReceivedToken:
    """A token as the client got it; `sequence` is the index that the server gave it."""

    sequence: int
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """All that one client saw of an answer, in order of arrival; `finish_reason` is empty when it never ended."""

    received: tuple[ReceivedToken, ...]
    tail_text: str
    finish_reason: str

    @property
    def text(self) -> str:
        """What a person would have read."""
        return "".join(token.text for token in self.received) + self.tail_text


class Fault(StrEnum):
    """How a promise can break."""

    LOST = "lost"
    DUPLICATED = "duplicated"
    REORDERED = "reordered"
    DIFFERING = "differing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise. `index` is that of the token, None when it is about the whole answer or session."""

    turn: int
    fault: Fault
    index: int | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Good when there are no findings, and something was compared."""

    n_turns: int
    n_tokens_compared: int
    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Nothing lost, nothing twice, nothing different; and not by comparing nothing."""
        return not self.findings and self.n_tokens_compared > 0

    def count(self, fault: Fault) -> int:
        """Findings of a kind."""
        return sum(finding.fault is fault for finding in self.findings)


def judge(
    disturbed: Sequence[AnswerRecord],
    control: Sequence[AnswerRecord],
    disturbed_tokens: Sequence[int] | None = None,
    control_tokens: Sequence[int] | None = None,
) -> Verdict:
    """Turns are compared pairwise; the token lists, when given, are the sessions' as their coordinators keep them.

    The control's answer is the truth: its tokens must be 0..n-1, else it is found faulty itself.
    """
    findings: list[Finding] = []
    for turn, (got, truth) in enumerate(zip(disturbed, control, strict=False), start=1):
        findings += _sequence_findings(turn, truth, len(truth.received), "control: ")
        findings += _sequence_findings(turn, got, len(truth.received), "")
        findings += _content_findings(turn, got, truth)
    for turn in range(len(disturbed), len(control)):
        findings.append(Finding(turn + 1, Fault.LOST, None, f"turn {turn + 1} never took place"))
    for turn in range(len(control), len(disturbed)):
        findings.append(Finding(turn + 1, Fault.DIFFERING, None, f"the control has no turn {turn + 1}"))
    if disturbed_tokens is not None and control_tokens is not None and list(disturbed_tokens) != list(control_tokens):
        at = _first_difference(disturbed_tokens, control_tokens)
        findings.append(Finding(len(control), Fault.DIFFERING, at, f"the stored sessions differ from token {at} on"))
    return Verdict(len(control), sum(len(truth.received) for truth in control), tuple(findings))


def _sequence_findings(turn: int, record: AnswerRecord, n_tokens: int, who: str) -> list[Finding]:
    """Each index of 0..n_tokens-1 must have come once, in order."""
    arrivals = [token.sequence for token in record.received]
    counts = Counter(arrivals)
    found = [
        Finding(turn, Fault.LOST, index, f"{who}turn {turn}: token {index} never came")
        for index in range(n_tokens)
        if counts[index] == 0
    ]
    found += [
        Finding(turn, Fault.DUPLICATED, index, f"{who}turn {turn}: token {index} came {count} times")
        for index, count in sorted(counts.items())
        for _ in range(count - 1)
    ]
    first_of_each = list(dict.fromkeys(arrivals))
    if first_of_each != sorted(first_of_each):
        found.append(Finding(turn, Fault.REORDERED, None, f"{who}turn {turn}: tokens came out of order"))
    return found


def _content_findings(turn: int, got: AnswerRecord, truth: AnswerRecord) -> list[Finding]:
    """Every token that came must be the control's at its index; so must the text and the way it ended."""
    ids = {token.sequence: token.token_id for token in truth.received}
    found = []
    for token in got.received:
        if token.sequence not in ids:
            sentence = f"turn {turn}: token {token.sequence} came, the control ended before it"
            found.append(Finding(turn, Fault.DIFFERING, token.sequence, sentence))
        elif token.token_id != ids[token.sequence]:
            sentence = f"turn {turn}: token {token.sequence} is {token.token_id}, the control has {ids[token.sequence]}"
            found.append(Finding(turn, Fault.DIFFERING, token.sequence, sentence))
    came_whole = [token.sequence for token in got.received] == list(ids)  # else the text cannot be equal
    if not found and came_whole and got.text != truth.text:
        found.append(Finding(turn, Fault.DIFFERING, None, f"turn {turn}: the text differs from the control's"))
    if got.finish_reason != truth.finish_reason:
        sentence = f"turn {turn} ended with {got.finish_reason or 'nothing'}, the control with {truth.finish_reason}"
        found.append(Finding(turn, Fault.DIFFERING, None, sentence))
    return found


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
