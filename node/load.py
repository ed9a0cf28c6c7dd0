"""What the engine thread tells about itself: counters, rates, and when it last got anywhere. Written by it, read by
all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvferry.engine.jobs import Counters, StepOutput
from kvferry.engine.scheduler import ROW_BUDGET
from kvferry.node.step_limit import StepLimit

RATE_WEIGHT: Final = 0.2
"""Weight of the newest measurement: the last dozen steps decide, so a rate follows a throttled board within seconds."""


@dataclass(slots=True)
class Rate:
    """An exponentially weighted rate, units per second; 0 until something was measured."""

    per_second: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One measurement."""
        if amount > 0 and seconds > 0:
            sample = amount / seconds
            weight = RATE_WEIGHT if self.per_second else 1.0
            self.per_second += weight * (sample - self.per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The engine thread's state at one moment, made anew after each step and never changed."""

    n_running: int = 0
    n_queued: int = 0
    kv_bytes_used: int = 0
    kv_bytes_budget: int = 0
    resident: tuple[tuple[str, int], ...] = ()  # (session id, rows)
    n_saved: int = 0  # idle sessions whose rows are in the store
    is_busy: bool = False
    progress_at: float = 0.0  # monotonic seconds
    stall_limit_seconds: float = 0.0  # from then on the engine hangs; 0: nobody knows

    def stalled_seconds(self, now: float) -> float:
        """Since the engine last finished a step while it had work; 0 when idle."""
        return max(now - self.progress_at, 0.0) if self.is_busy else 0.0


@dataclass(slots=True)
class Totals:
    """Counters and rates since start."""

    rows_prefilled: int = 0
    tokens_generated: int = 0
    tokens_proposed: int = 0
    tokens_accepted: int = 0
    engine_steps: int = 0
    prompts_covered: int = 0
    snapshots_published: int = 0
    snapshots_failed: int = 0
    saves_not_worth_it: int = 0
    snapshots_refused: int = 0
    blocks_audited: int = 0
    blocks_wrong: int = 0
    prefill_rate: Rate = field(default_factory=Rate)
    decode_rate: Rate = field(default_factory=Rate)
    restore_rate: Rate = field(default_factory=Rate)
    step_limit: StepLimit = field(default_factory=lambda: StepLimit(ROW_BUDGET))

    def measure(self, outputs: Sequence[StepOutput], seconds: float, counters: Counters) -> None:
        """What a step of so many seconds did, and the scheduler's counters after it."""
        n_decoded = sum(output.token is not None and output.n_rows == 1 for output in outputs)
        n_rows = sum(output.n_rows for output in outputs)
        self.step_limit.learn(n_rows, n_decoded, seconds)
        if n_rows == n_decoded:
            self.decode_rate.add(n_decoded, seconds)
        elif n_decoded == 0:
            self.prefill_rate.add(n_rows, seconds)
        self.engine_steps = counters.n_steps
        self.rows_prefilled = counters.n_rows_prefilled
        self.tokens_generated = counters.n_tokens_generated
        self.tokens_proposed = counters.n_tokens_proposed
        self.tokens_accepted = counters.n_tokens_accepted
