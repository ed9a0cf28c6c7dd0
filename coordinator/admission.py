"""The order in which turns look for a node."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class Admission:
    """Turns that could choose a node at the same moment do so one after the other: higher priority first, then age.

    A node that comes back wakes all who wait for one. All methods from one event loop.
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def arrival(self) -> int:
        """A turn's age: its place in the order in which turns came."""
        return next(self._arrivals)

    async def place(self, priority: int, arrival: int) -> None:
        """Until those before it, of all that ask now, have gone on; no two turns ask with one arrival."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._let_go_on)  # after all that are ready to run now
        gone_on: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (-priority, arrival, gone_on))
        await gone_on

    def _let_go_on(self) -> None:
        while self._waiting:
            *_, gone_on = heapq.heappop(self._waiting)
            if not gone_on.done():
                gone_on.set_result(None)
