"""How many bytes a node may write per hour, to spare flash that wears out. Pure: the time is passed in."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

HOUR_S: Final = 3600.0


class WriteBudget:
    """Bytes written within the last hour, against a limit. Any thread may call any method."""

    def __init__(self, bytes_per_hour: int) -> None:
        self.bytes_per_hour = bytes_per_hour
        self._lock = threading.Lock()  # guards the two below
        self._written: deque[tuple[float, int]] = deque()
        self._sum = 0

    def left(self, now_s: float) -> int:
        """Bytes that may still be written."""
        with self._lock:
            while self._written and self._written[0][0] <= now_s - HOUR_S:
                self._sum -= self._written.popleft()[1]
            return self.bytes_per_hour - self._sum

    def spend(self, now_s: float, n_bytes: int) -> None:
        """Counts bytes that were written; a failed save's count as well."""
        with self._lock:
            self._written.append((now_s, n_bytes))
            self._sum += n_bytes
