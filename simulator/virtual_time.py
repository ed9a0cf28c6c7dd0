"""An asyncio loop whose clock moves only when everybody sleeps: an hour of heartbeats takes a second, and the same
seed gives the same run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NobodyWakes(RuntimeError):
    """Every task waits for another one: a deadlock."""


class _Clock(selectors.SelectSelector):
    """Where a real loop would wait for sockets, the time moves on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NobodyWakes("no task can go on and none waits for the clock")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sockets and threads do not exist here; sleeping costs nothing."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end of ``main``; whoever is left then is cancelled."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_end_the_others())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _end_the_others() -> None:
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
