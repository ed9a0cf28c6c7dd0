"""The planner's boards, going by steps of the engine: its own pacer and plan of rows say what each step computes.

With rates like those of the nodes of ``routing_real``, so that rules can be compared on its traffic many times over on
a virtual clock. Also boards that are slower for some seconds now and then, as processes are on a machine they share.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Final

from kvferry.engine.jobs import plan_rows
from kvferry.engine.pacing import StepPacer
from kvferry.simulator.fleet_model import BoardRates, Job, ModelBoard, SharedStore

ROW_BUDGET: Final = 512
TILE_ROWS: Final = 16
PASS_ROWS: Final = 4
SCATTER: Final = 0.08
"""Of a step's seconds, log-normal."""

SPELL_SECONDS: Final = 4.0
SPELLS: Final = (1.0, 1.0, 1.7, 3.0)
"""How many times slower a board is, drawn anew for each spell, if it is unsteady."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    ends_s: float
    seconds: float
    n_decodes: int
    n_prefill_rows: int
    # By the identity of the job.
    rows: dict[int, int]


class SteppingBoard(ModelBoard):
    """Time goes forward by whole steps."""

    def __init__(self, name: str, rates: BoardRates, store: SharedStore, *, unsteady: bool = False) -> None:
        super().__init__(name, rates, store)
        self._pacer = StepPacer(target_ratio=rates.decode_slowdown, tile_rows=TILE_ROWS, pass_rows=PASS_ROWS)
        self._rng = random.Random(name)
        self._unsteady = unsteady
        self._step: _Step | None = None

    def submit(self, job: Job, now_s: float) -> None:
        super().submit(job, now_s)
        if self._step is None:
            self._begin_step()

    def next_s(self) -> float:
        times = [j.restored_s for j in self.reading]
        if self._step is not None:
            times.append(self._step.ends_s)
        return min(times, default=float("inf"))

    def advance(self, now_s: float) -> tuple[list[Job], list[Job]]:
        self._now_s = now_s
        self._end_reads()
        if self._step is not None and self._step.ends_s > now_s + 1e-9:
            return [], []
        started, ended = self._end_step(self._step) if self._step is not None else ([], [])
        self._begin_step()
        return started, ended

    def _begin_step(self) -> None:
        self._step = None
        n_decodes = len(self.decoding)
        if not n_decodes and not self.prefilling:
            return
        pending = [1] * n_decodes + [max(1, round(j.work_s / self._row_s)) for j in self.prefilling]
        is_decoding = [True] * n_decodes + [False] * len(self.prefilling)
        most = min(ROW_BUDGET - n_decodes, self._pacer.rows(n_decodes))
        rows = plan_rows(pending, is_decoding, [0] * len(pending), most)
        n_prefill_rows = sum(rows[n_decodes:])
        seconds = self._row_s * n_prefill_rows + (self.rates.decode_seconds(n_decodes) if n_decodes else 0.0)
        seconds *= self._rng.lognormvariate(0.0, SCATTER) * self._slowness()
        by_job = {id(j): n for j, n in zip([*self.decoding, *self.prefilling], rows, strict=True)}
        self._step = _Step(self._now_s + seconds, seconds, n_decodes, n_prefill_rows, by_job)

    def _end_step(self, step: _Step) -> tuple[list[Job], list[Job]]:
        self._pacer.learn(step.n_decodes, step.n_prefill_rows, step.seconds)
        for job in self.prefilling:
            job.work_s -= step.rows.get(id(job), 0) * self._row_s
            if job.work_s < self._row_s / 2:
                job.work_s = 0.0
        for job in self.decoding:
            job.tokens_left -= step.rows.get(id(job), 0)
        return self._move_on()

    @property
    def _row_s(self) -> float:
        return 1 / self.rates.prefill_tokens_per_s

    def _slowness(self) -> float:
        if not self._unsteady:
            return 1.0
        return random.Random(f"{self.name} {int(self._now_s / SPELL_SECONDS)}").choice(SPELLS)


BOARD_135M: Final = BoardRates(
    prefill_tokens_per_s=900.0, half_speed_depth=3_000.0, decode_tokens_per_s=45.0, decode_drag=2.0,
    decode_slowdown=3.0, read_bytes_per_s=60e6, read_latency_s=0.03, bytes_per_row=23_040, memory_rows=16_000,
)  # fmt: skip
"""The demo's model on a whole core, about as ``routing_real`` measured its nodes."""
