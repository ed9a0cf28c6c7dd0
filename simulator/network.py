"""Links between processes: delays, cuts in either direction, messages that come twice or out of order."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Final

MIN_DELAY_S: Final = 0.0003
MAX_DELAY_S: Final = 0.02
MAX_RETRANSMISSION_S: Final = 3.0
"""Retransmission timers double while a link is down."""


@dataclasses.dataclass(slots=True)
class Chances:
    """How often each message meets a mishap; 0 once the storm is over."""

    duplicate: float = 0.0
    slow: float = 0.0


class Network:
    """All links of a cluster.

    What is sent over a cut link waits there, as TCP's segments do, and comes when it heals.
    """

    def __init__(self, rng: random.Random, sometimes: Counter[str]) -> None:
        self.chances = Chances()
        self.rng = rng
        self.sometimes = sometimes
        self._cut: dict[tuple[str, str], asyncio.Event] = {}

    def cut(self, source: str, target: str) -> None:
        """One direction only."""
        self._cut.setdefault((source, target), asyncio.Event())

    def heal(self, source: str, target: str) -> None:
        event = self._cut.pop((source, target), None)
        if event is not None:
            event.set()

    def heal_all(self) -> None:
        for source, target in list(self._cut):
            self.heal(source, target)

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    async def _until_connected(self, source: str, target: str) -> None:
        """What waited comes when TCP tries again, which may be a while after the link is back."""
        if not self.is_cut(source, target):
            return
        while (event := self._cut.get((source, target))) is not None:
            await event.wait()
        await asyncio.sleep(self.rng.uniform(0.0, MAX_RETRANSMISSION_S))

    def delay_s(self) -> float:
        if self.rng.random() < self.chances.slow:
            return self.rng.uniform(0.1, 1.5)
        return self.rng.uniform(MIN_DELAY_S, MAX_DELAY_S)

    def n_copies(self) -> int:
        return 2 if self.rng.random() < self.chances.duplicate else 1

    async def carry(self, source: str, target: str) -> None:
        """One message's way; messages that take it at the same time may overtake each other."""
        await self._until_connected(source, target)
        await asyncio.sleep(self.delay_s())
        await self._until_connected(source, target)

    def later(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Send without waiting."""
        loop = asyncio.get_running_loop()
        if not self.is_cut(source, target):
            loop.call_later(self.delay_s(), deliver)
            return

        async def carry() -> None:
            await self.carry(source, target)
            deliver()

        task = loop.create_task(carry())
        _HELD.add(task)
        task.add_done_callback(_HELD.discard)


_HELD: Final[set[asyncio.Task[None]]] = set()
"""Tasks nobody waits for, held so that they are not collected."""
