"""How fast a caller may ask: a bucket that fills with time. Pure: the time is an argument."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Bucket:
    """Holds ``per_minute`` calls at most, and gets so many back in a minute."""

    per_minute: int
    filled_s: float
    level: float = -1.0

    def __post_init__(self) -> None:
        self.level = float(self.per_minute) if self.level < 0 else self.level

    def take(self, now_s: float) -> float:
        """One call; 0, or the seconds until there is room for it."""
        rate = self.per_minute / 60
        self.level = min(float(self.per_minute), self.level + (now_s - self.filled_s) * rate)
        self.filled_s = now_s
        if self.level >= 1:
            self.level -= 1
            return 0.0
        return (1 - self.level) / rate
