"""Small tools for tasks: a bell that wakes many, a wait for the first of several, work that is done whole, and tasks
nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Bell:
    """Wakes any number of tasks at once, with nothing to hold for those who are slow.

    Read ``count``, look at the state, then wait for a ring after that count: no ring is missed, whenever the waiter
    gets to run.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self.count += 1
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    async def wait(self, seen_count: int, timeout_seconds: float | None = None) -> bool:
        """True at the first ring after ``seen_count``; False when the time ran out before."""
        if self.count != seen_count:
            return True
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        # asyncio.wait leaves the shared future alone when this waiter is cancelled or runs out of time
        done, _ = await asyncio.wait([self._next], timeout=timeout_seconds)
        return bool(done)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them ends.

    The others are cancelled, and gone when this returns. Raises what the first one raised.
    """
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def to_its_end(work: Coroutine[Any, Any, T], name: str) -> T:
    """Not the caller's to cancel: what has begun is done whole, even when whoever asked for it is gone."""
    return await asyncio.shield(asyncio.create_task(work, name=name))


class Background:
    """Tasks that nobody waits for, held so that they are not collected, ended by ``close``."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel them all and wait until they are gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
