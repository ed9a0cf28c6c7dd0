"""How fast each node restores and prefills, learned from what its turns reported. Pure.

Two linear laws, each with two coefficients per node, and three plain averages:

    prefill seconds = tokens * per_token + (token, earlier row) pairs * per_pair     weights, and attention at depth
    restore seconds = latency + bytes * per_byte
    look seconds    = image tokens * per_token                                       the vision tower
    drag            = how many times slower prompts get on beside decodes
    start seconds   = from the placement to the first step, with and without decodes: two ways, and a step's end

The coefficients are those that make the *relative* error of the latest reports smallest (weighted least squares);
older reports count less, by number and by age, since a board that throttles is another board. A few pseudo-reports
stand for what was known before: the node's own figures in its heartbeats (it measures itself while it warms up and
works), else the fleet's, else a guess that is wrong for one turn.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Final

KEEP_PER_REPORT: Final = 0.8
"""The last half dozen reports carry most of the weight: a rate follows a throttled board within a dozen turns."""

HALF_LIFE_SECONDS: Final = 600.0
"""A board's temperature settles within minutes; what it did before the tea break says little."""

PRIOR_WEIGHT: Final = 0.01
"""Of a report each: the first real one decides already, even against a guess that was five times too fast."""

GUESSED_PREFILL_TOKENS_PER_SECOND: Final = 100.0
GUESSED_RESTORE_BYTES_PER_SECOND: Final = 1e8
"""A small model on a four-core board, and gigabit Ethernet. Wrong until the first turn, on all nodes alike."""

GUESSED_HALF_SPEED_DEPTH: Final = 6_000.0
"""At this many earlier rows attention costs as much as the weights, for want of a measurement."""

GUESSED_RESTORE_LATENCY_SECONDS: Final = 0.02

MIN_LEARNT_SECONDS: Final = 1e-4
"""Shorter spans say more about the clock than about the node."""

GUESSED_DRAG: Final = 2.0
"""Measured with the pacer's usual ratio, one thread (BENCHMARKS.md, time between tokens beside a long prompt)."""

DRAG_WEIGHT: Final = 0.2
MAX_DRAG: Final = 20.0

START_WEIGHT: Final = 0.2
"""Of the latest turn's way to its first step, and of the latest look at a picture."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One node's coefficients at one moment; see the module's docstring. All in seconds."""

    prefill_per_token: float = 1 / GUESSED_PREFILL_TOKENS_PER_SECOND
    prefill_per_pair: float = 1 / GUESSED_PREFILL_TOKENS_PER_SECOND / GUESSED_HALF_SPEED_DEPTH
    restore_latency: float = GUESSED_RESTORE_LATENCY_SECONDS
    restore_per_byte: float = 1 / GUESSED_RESTORE_BYTES_PER_SECOND
    look_per_token: float = 1 / GUESSED_PREFILL_TOKENS_PER_SECOND
    # By how much the same prefill takes longer beside other turns' decoding.
    decode_drag: float = GUESSED_DRAG
    # From a placement to the first step that computes for it, if only the way there and a step's end are waited for.
    start_idle: float = 0.0
    start_beside_decodes: float = 0.0

    def prefill_seconds(self, n_reused: int, n_tokens: int) -> float:
        """To compute the rows from ``n_reused`` up to ``n_tokens``, with nothing else to do."""
        return max(
            0.0,
            (n_tokens - n_reused) * self.prefill_per_token + pairs(n_reused, n_tokens) * self.prefill_per_pair,
        )

    def restore_seconds(self, n_bytes: float) -> float:
        return self.restore_latency + n_bytes * self.restore_per_byte if n_bytes else 0.0


def pairs(n_reused: int, n_tokens: int) -> float:
    """(token, row before it) pairs that attention visits for the tokens from ``n_reused`` up to ``n_tokens``."""
    return (n_tokens - n_reused) * (n_tokens + n_reused) / 2


@dataclasses.dataclass(slots=True)
class _Law:
    """seconds = a * x0 + b * x1, fitted with decay; the sums of the normal equations of the relative error."""

    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    x1: float = 0.0
    y1: float = 0.0
    at_s: float = 0.0

    def learn(self, x0: float, x1: float, seconds: float, now_s: float) -> None:
        keep = KEEP_PER_REPORT * 0.5 ** (max(0.0, now_s - self.at_s) / HALF_LIFE_SECONDS)
        u, v = x0 / seconds, x1 / seconds
        self.xx = self.xx * keep + u * u
        self.xy = self.xy * keep + u * v
        self.yy = self.yy * keep + v * v
        self.x1 = self.x1 * keep + u
        self.y1 = self.y1 * keep + v
        self.at_s = now_s

    def fit(self, prior_a: float, prior_b: float) -> tuple[float, float]:
        """(a, b), neither negative."""
        pa, pb = 1 / prior_a, 1 / prior_b
        xx, yy = self.xx + PRIOR_WEIGHT * pa * pa, self.yy + PRIOR_WEIGHT * pb * pb
        x1, y1 = self.x1 + PRIOR_WEIGHT * pa, self.y1 + PRIOR_WEIGHT * pb
        det = xx * yy - self.xy * self.xy
        a = (x1 * yy - y1 * self.xy) / det
        b = (y1 * xx - x1 * self.xy) / det
        if b < 0:
            return x1 / xx, 0.0
        if a < 0:
            return 0.0, y1 / yy
        return a, b


@dataclasses.dataclass(frozen=True, slots=True)
class Foreseen:
    """Seconds of a prefill beside others, and the drag that was believed in."""

    prefill_seconds: float = 0.0
    drag: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a placement told about its prefix, and under which circumstances."""

    n_tokens: int
    n_restored: int
    n_computed: int
    restore_seconds: float
    prefill_seconds: float
    bytes_per_row: int
    # Image tokens that the vision tower worked on.
    n_looked: int = 0
    look_seconds: float = 0.0
    # Nobody else prefilled, or read from the store, at any time in between: the spans are this turn's alone.
    prefilled_alone: bool
    restored_alone: bool
    beside_decodes: bool
    foreseen: Foreseen = Foreseen()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A node's own figures, per second; 0 for what it has not measured yet."""

    prefill_tokens: float = 0.0
    restore_bytes: float = 0.0


@dataclasses.dataclass(slots=True)
class _Average:
    """Of the latest samples, the first ones counting as much as they are many; None before there is one."""

    weight: float
    value: float | None = None
    _n: int = 0

    def learn(self, sample: float, instead: float) -> None:
        """``instead``: what was believed before the first sample; counts as one."""
        before = instead if self.value is None else self.value
        self._n += 1
        self.value = before + max(self.weight, 1 / (self._n + 1)) * (sample - before)

    def or_else(self, instead: float) -> float:
        return instead if self.value is None else self.value


class NodeRates:
    """What was learned about one boot of a node."""

    def __init__(self) -> None:
        self._prefill = _Law()
        self._restore = _Law()
        self._look = _Average(START_WEIGHT)
        self._drag = _Average(DRAG_WEIGHT)
        self._start_idle = _Average(START_WEIGHT)
        self._start_beside = _Average(START_WEIGHT)
        self._known_for: tuple[Told, Rates] | None = None
        self._known = Rates()

    def learn(self, report: Report, told: Told, fleet: Rates, now_s: float) -> None:
        n_reused = report.n_tokens - report.n_computed
        self._known_for = None
        if report.n_computed and report.prefill_seconds >= MIN_LEARNT_SECONDS:
            if not report.prefilled_alone:
                self._learn_shared(report, fleet)
            elif report.beside_decodes:
                alone_s = self._fit(told, fleet).prefill_seconds(n_reused, report.n_tokens)
                self._learn_drag(report.prefill_seconds / max(alone_s, MIN_LEARNT_SECONDS), fleet)
            else:
                self._prefill.learn(report.n_computed, pairs(n_reused, report.n_tokens), report.prefill_seconds, now_s)
        if report.n_restored and report.restored_alone and report.restore_seconds >= MIN_LEARNT_SECONDS:
            self._restore.learn(1.0, report.n_restored * report.bytes_per_row, report.restore_seconds, now_s)
        if report.n_looked and report.look_seconds >= MIN_LEARNT_SECONDS:
            self._look.learn(report.look_seconds / report.n_looked, fleet.look_per_token)

    def _learn_shared(self, report: Report, fleet: Rates) -> None:
        """A span that others shared says nothing of the engine's rate, but whether such spans last as long as foreseen.

        They last longer where many decode, and where others keep coming; what they last longer counts as drag.
        """
        foreseen = report.foreseen
        if foreseen.prefill_seconds >= MIN_LEARNT_SECONDS:
            self._learn_drag(foreseen.drag * report.prefill_seconds / foreseen.prefill_seconds, fleet)

    def _learn_drag(self, ratio: float, fleet: Rates) -> None:
        self._drag.learn(min(max(ratio, 1.0), MAX_DRAG), fleet.decode_drag)

    def learn_start(self, seconds: float, fleet: Rates, *, beside_decodes: bool) -> None:
        """What came between a placement and its first step while no other prompt was in the way."""
        self._known_for = None
        if beside_decodes:
            self._start_beside.learn(max(0.0, seconds), fleet.start_beside_decodes)
        else:
            self._start_idle.learn(max(0.0, seconds), fleet.start_idle)

    def now(self, told: Told, fleet: Rates) -> Rates:
        """The coefficients; ``fleet`` is what is believed of a node that has said nothing."""
        if self._known_for != (told, fleet):
            self._known, self._known_for = self._fit(told, fleet), (told, fleet)
        return self._known

    def _fit(self, told: Told, fleet: Rates) -> Rates:
        per_token, per_byte = fleet.prefill_per_token, fleet.restore_per_byte
        per_pair = fleet.prefill_per_pair
        if told.prefill_tokens > 0:
            scale = 1 / told.prefill_tokens / per_token
            per_token, per_pair = per_token * scale, per_pair * scale
        if told.restore_bytes > 0:
            per_byte = 1 / told.restore_bytes
        a, b = self._prefill.fit(per_token, per_pair)
        latency, each_byte = self._restore.fit(fleet.restore_latency, per_byte)
        return Rates(
            prefill_per_token=a, prefill_per_pair=b, restore_latency=latency, restore_per_byte=each_byte,
            look_per_token=self._look.or_else(fleet.look_per_token),
            decode_drag=self._drag.or_else(fleet.decode_drag),
            start_idle=self._start_idle.or_else(fleet.start_idle),
            start_beside_decodes=self._start_beside.or_else(fleet.start_beside_decodes),
        )  # fmt: skip

    @property
    def has_learned(self) -> bool:
        return self._prefill.xx > 0


def typical(rates: Iterable[Rates]) -> Rates:
    """The fleet's, for a newcomer: the median of each coefficient, rates never zero."""
    known = list(rates)
    if not known:
        return Rates()
    guess = Rates()
    return Rates(
        prefill_per_token=statistics.median(r.prefill_per_token for r in known) or guess.prefill_per_token,
        prefill_per_pair=statistics.median(r.prefill_per_pair for r in known) or guess.prefill_per_pair,
        restore_latency=statistics.median(r.restore_latency for r in known) or guess.restore_latency,
        restore_per_byte=statistics.median(r.restore_per_byte for r in known) or guess.restore_per_byte,
        look_per_token=statistics.median(r.look_per_token for r in known),
        decode_drag=statistics.median(r.decode_drag for r in known),
        start_idle=statistics.median(r.start_idle for r in known),
        start_beside_decodes=statistics.median(r.start_beside_decodes for r in known),
    )
