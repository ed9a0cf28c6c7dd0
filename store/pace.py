"""Keeping to a rate, so that looking after a store does not take the disk from the nodes."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Waits so that no more than ``bytes_per_s`` (0: any number) have been read since it was made. Not thread-safe."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._started_s = clock()
        self.n_bytes = 0

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self._clock() - self._started_s

    def read(self, n_bytes: int) -> None:
        """So much was read; returns when more may be."""
        self.n_bytes += n_bytes
        if self._bytes_per_s:
            wait_s = self.n_bytes / self._bytes_per_s - self.seconds
            if wait_s > 0:
                self._sleep(wait_s)
