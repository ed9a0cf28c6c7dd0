"""How late the event loop wakes: whatever blocks it shows here, and a promise is made about it (promise 28)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric

from kvferry.telemetry.families import labelled

INTERVAL_SECONDS: Final = 0.02
"""Of the measurements: costs nothing, and a blockage of a fifth of a second is met by ten of them."""

N_SAMPLES: Final = 1500
"""Half a minute."""


@dataclass(frozen=True, slots=True)
class LagSummary:
    """Seconds by which the loop was late, and of how many measurements."""

    p50: float = 0.0
    p99: float = 0.0
    largest: float = 0.0
    n_samples: int = 0


@dataclass(slots=True)
class LoopLag:
    """Measures the loop that `run` runs in; event loop only."""

    clock: Callable[[], float]
    beat_at: float = 0.0  # when it woke last; any thread may look
    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=N_SAMPLES))

    async def run(self) -> None:
        """For ever; cancel it to stop."""
        while True:
            self.beat_at = self.clock()
            due = self.beat_at + INTERVAL_SECONDS
            await asyncio.sleep(INTERVAL_SECONDS)
            self.add(self.clock() - due)

    def add(self, seconds: float) -> None:
        """One measurement."""
        self._samples.append(max(seconds, 0.0))

    def summary(self) -> LagSummary:
        """Over the latest half minute."""
        if not self._samples:
            return LagSummary()
        ranked = sorted(self._samples)
        last = len(ranked) - 1
        return LagSummary(ranked[round(0.50 * last)], ranked[round(0.99 * last)], ranked[last], len(ranked))

    def metric(self) -> Metric:
        """The summary, as every process tells it."""
        lag = self.summary()
        return labelled(
            "event_loop_lag_seconds", "How late the event loop woke in the last half minute.", "quantile",
            {"0.5": lag.p50, "0.99": lag.p99, "1": lag.largest},
        )  # fmt: skip
