"""What the engine bench prints: lines of a table with ratios, shares of the machine's limits, and what is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from kvferry.bench.workload import Measured, ratio

Clock = Literal["wall", "cpu"]

SAME_FILE: Final = "same file"
# By threads and task, on the demo model: the ratio that is asked for, to the same file and to the peer's fastest.
TARGETS: Final[Mapping[tuple[int, str], tuple[float | None, float]]] = {
    (1, "prefill 512"): (4.5, 2.0),
    (1, "prefill 2048"): (4.5, 2.0),
    (1, "decode at depth 0"): (2.5, 2.0),
    (1, "decode at depth 2048"): (2.5, 2.0),
    (2, "prefill 128"): (None, 1.8),
    (2, "prefill 512"): (None, 1.8),
    (2, "prefill 2048"): (None, 1.8),
    (2, "decode at depth 0"): (None, 1.8),
    (2, "decode, batch of 8"): (None, 2.0),
}


@dataclass(frozen=True)
class Line:
    """One task: our figures, for each peer file those of its better setting, and ``share``: how much of ``limit``, the
    machine's, ours is."""

    task: str
    ours: Measured
    peers: Mapping[str, Measured]
    share: float | None = None
    limit: str = ""

    def ratio(self, label: str, clock: Clock) -> float:
        return ratio(getattr(self.ours, clock), getattr(self.peers[label], clock))


@dataclass(frozen=True)
class Judgement:
    """A ratio that is asked for, and what it is."""

    what: str
    asked: float
    found: float

    @property
    def is_met(self) -> bool:
        return self.found >= self.asked

    def __str__(self) -> str:
        return f"{self.what}: {self.found:.2f}, asked for {self.asked:g}: {'met' if self.is_met else 'SHORT'}"


def judged(lines: Sequence[Line], n_threads: int, clock: Clock) -> list[Judgement]:
    """Of these lines, those that TARGETS names. The fastest of the peer's files is whichever it is, task by task."""
    found = []
    for line in lines:
        same, fastest = TARGETS.get((n_threads, line.task), (None, None))
        threads = f"{n_threads} thread" + ("s" if n_threads > 1 else "")
        if same is not None and SAME_FILE in line.peers:
            found.append(Judgement(f"{line.task}, {threads}, {SAME_FILE}", same, line.ratio(SAME_FILE, clock)))
        if fastest is not None and line.peers:
            label = max(line.peers, key=lambda label: median(getattr(line.peers[label], clock)))
            found.append(Judgement(f"{line.task}, {threads}, its fastest", fastest, line.ratio(label, clock)))
    return found


def markdown(lines: Sequence[Line], labels: Sequence[str], clock: Clock) -> list[str]:
    """The table, ready for BENCHMARKS.md."""
    heading = [
        "task",
        "kvferry",
        *(text for label in labels for text in (f"llama.cpp {label}", "ratio")),
        "of the machine",
    ]
    rows = ["| " + " | ".join(heading) + " |", "|" + " --- |" * len(heading)]
    for line in lines:
        cells = [line.task, _figure(line.ours, clock)]
        share = "-" if line.share is None else f"{line.share:.0%} of {line.limit}"
        for label in labels:
            if label in line.peers:
                cells += [_figure(line.peers[label], clock), f"{line.ratio(label, clock):.2f}"]
            else:
                cells += ["-", "-"]
        rows.append("| " + " | ".join([*cells, share]) + " |")
    return rows


def quietness(lines: Sequence[Line], n_threads: int) -> float:
    """The part of the wall clock that our threads had a processor, at the median: 1 on a machine of our own."""
    parts = [wall / cpu / n_threads for line in lines for wall, cpu in zip(line.ours.wall, line.ours.cpu, strict=True)]
    return median(parts)


def _figure(measured: Measured, clock: Clock) -> str:
    speed = median(getattr(measured, clock))
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}"
