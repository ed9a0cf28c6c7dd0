"""How many prefill rows a step may take, judged by how long steps took. Pure: whoever measures brings the seconds.

Two promises are kept. Of steps that also decode 99 in 100 take at most `target_ratio` times as long as the decodes
would take by themselves, so that a long prompt slows the running sessions by no more than that: the pacer aims as far
below as steps were seen to scatter. A step without decodes takes at most `step_seconds`, since a stop takes effect
between two steps and a node that shows no progress counts as hung.

What is drawn never depends on this: rows have the same bits in whatever chunks they are computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

TARGET_RATIO: Final = 3.0
"""Held against the middle of undisturbed steps, which scatter too: with this, 99 in 100 tokens beside a prompt came
within 2.5 times what 99 in 100 take without one (BENCHMARKS.md)."""

SCATTER: Final = 1.11
"""How much longer than foreseen a long step takes, before enough were seen; and at least and at most, what may be
learned: a machine that is taken away now and then must not bring a prompt to a halt."""
LEAST_SCATTER: Final = 1.0
MOST_SCATTER: Final = 1.25
SCATTER_WINDOW: Final = 64
"""Steps whose third longest, beside what was foreseen, counts: the first two are left to chance."""
SCATTER_KNOWN: Final = 8

WINDOW: Final = 5
"""Measurements whose median counts: two outliers (a step that the kernel took the processor from) do not matter, and
rates follow the depth of a prompt and the temperature of a board within a few steps."""

TILE_SHARE: Final = 0.2
"""Of what a full tile of a prompt's rows takes, how much one of few rows takes as well, to read keys and values:
measured at a depth of 2,000 with tiles of 16 rows. Nearer the beginning it is less."""

RULERS: Final = 3
"""Undisturbed steps whose median counts: fewer, since they lie far apart, and sessions grow meanwhile."""

RULER_EVERY: Final = 24
"""Mixed steps after which two steps only decode, to measure anew what an undisturbed one takes: costs about 4 %. The
first finds the caches full of the prompt's rows and is no measure; the second counts."""

MIN_ROWS: Final = 4
"""A prompt always gets on, by one tile of the kernels. Also where a step beside decodes starts from, before it is known
what a row costs there."""

FIRST_ROWS_ALONE: Final = 64
"""Without decodes, before it is known what a row costs: a first step that ends soon on any board."""


def _window() -> deque[float]:
    return deque(maxlen=WINDOW)


@dataclass(slots=True)
class StepPacer:
    """Learns from steps and sizes the next ones. Not thread-safe."""

    target_ratio: float = TARGET_RATIO
    step_seconds: float = 0.5
    max_rows: int = 256
    tile_rows: int = 1  # attention reads a sequence's keys once for so many rows
    pass_rows: int = 1  # and computes with so many at a time: fewer cost as much
    _undisturbed: dict[int, deque[float]] = field(default_factory=dict)  # seconds of a step by its number of decodes
    _row_beside: deque[float] = field(
        default_factory=_window
    )  # seconds that a prefill row of a full tile adds to decodes
    _row_alone: deque[float] = field(default_factory=_window)
    _n_beside: deque[int] = field(default_factory=lambda: deque([MIN_ROWS], maxlen=WINDOW))  # rows of mixed steps
    _surprises: deque[float] = field(default_factory=lambda: deque(maxlen=SCATTER_WINDOW))  # taken by foreseen seconds
    _n_mixed: int = 0  # mixed steps since the latest undisturbed one
    _n_decodes_before: int = 0  # of the latest step, if it only decoded

    def __post_init__(self) -> None:
        if not (
            self.target_ratio > 1
            and self.step_seconds > 0
            and self.max_rows >= 1
            and self.tile_rows >= self.pass_rows >= 1
        ):
            raise ValueError(f"there is no pace of {self!r}")

    def rows(self, n_decodes: int) -> int:
        """Most prefill rows of a step with that many decodes; 0 when it should only decode, to be measured."""
        return self._rows_beside(n_decodes) if n_decodes else self._rows_alone()

    def learn(self, n_decodes: int, n_prefill_rows: int, seconds: float) -> None:
        """What a step took."""
        follows_its_like, self._n_decodes_before = self._n_decodes_before == n_decodes, 0
        if n_prefill_rows == 0:
            self._n_decodes_before = n_decodes
            if follows_its_like:
                self._undisturbed.setdefault(n_decodes, deque(maxlen=RULERS)).append(seconds)
                self._n_mixed = 0
        elif n_decodes == 0:
            self._row_alone.append(seconds / n_prefill_rows)
        else:
            self._n_mixed += 1
            self._n_beside.append(n_prefill_rows)
            undisturbed = self._undisturbed.get(n_decodes)
            if undisturbed and n_prefill_rows >= MIN_ROWS:  # the end of a prompt bears what a step costs anyhow
                if self._row_beside:
                    foreseen = median(undisturbed) + self._cost(n_prefill_rows) * median(self._row_beside)
                    self._surprises.append(seconds / foreseen if foreseen > 0 else 1.0)
                self._row_beside.append(max(seconds - median(undisturbed), 0.0) / self._cost(n_prefill_rows))

    def _rows_beside(self, n_decodes: int) -> int:
        undisturbed = self._undisturbed.get(n_decodes)
        if not undisturbed or self._n_mixed >= RULER_EVERY:
            return 0
        if not self._row_beside:
            return min(MIN_ROWS, self.max_rows)
        spare = max(self.target_ratio / self._scatter() - 1, 0.0) * median(undisturbed)
        most = max(2 * max(self._n_beside), MIN_ROWS)  # one lucky measurement must not make the next step a long one
        most = min(most, self.max_rows)
        fitting = spare / row_seconds if (row_seconds := median(self._row_beside)) > 0 else float("inf")
        n_rows = next((n for n in range(most, MIN_ROWS, -1) if self._cost(n) <= fitting), min(MIN_ROWS, most))
        left = n_rows % self.tile_rows
        return n_rows - left if n_rows > self.tile_rows and 2 * left < self.tile_rows else n_rows

    def _cost(self, n_rows: int) -> float:
        """Of a prompt's rows, in rows of full tiles."""
        in_tiles, in_passes = (-(-n_rows // size) * size for size in (self.tile_rows, self.pass_rows))
        return TILE_SHARE * in_tiles + (1 - TILE_SHARE) * in_passes

    def _scatter(self) -> float:
        """How much longer than foreseen a step may turn out."""
        if len(self._surprises) < SCATTER_KNOWN:
            return SCATTER
        largest = sorted(self._surprises)[-3]
        return min(max(largest, LEAST_SCATTER), MOST_SCATTER)

    def _rows_alone(self) -> int:
        if not self._row_alone:
            return min(FIRST_ROWS_ALONE, self.max_rows)
        return self._bounded(self.step_seconds, median(self._row_alone), self.max_rows)

    def _bounded(self, seconds: float, row_seconds: float, most: int) -> int:
        fitting = int(seconds / row_seconds) if row_seconds > 0 else most
        return min(max(fitting, MIN_ROWS), most, self.max_rows)
