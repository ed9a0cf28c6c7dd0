"""How hot the board is, for the coordinator: one that throttles is slow for a reason that its load does not show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.telemetry.host import SYS, temperatures

LOOK_SECONDS: Final = 5.0
"""Some sensors hang on a slow bus; a board warms over minutes."""


@dataclass(slots=True)
class Thermometer:
    """Looks from time to time."""

    sys: Path = SYS
    _hottest: float | None = None
    _looked_at: float = -math.inf

    def hottest(self, now: float) -> float | None:
        """Celsius of the hottest zone, some seconds old; None where there is none. `now`: monotonic seconds."""
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._hottest = max(temperatures(self.sys).values(), default=None)
        return self._hottest
