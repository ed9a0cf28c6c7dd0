"""Which model a request is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvferry.client import AsyncClient

FRESH_SECONDS: Final = 5.0
"""A model that joins the fleet is found within them; a request must not cost a call of its own."""


@dataclass(slots=True)
class Models:
    """The names that the coordinator serves, asked for now and then. `clock`: seconds that do not jump."""

    client: AsyncClient
    clock: Callable[[], float]
    _name: str = ""
    _asked_at: float = field(default=float("-inf"))

    async def served(self) -> str:
        """The name that answers carry. A cluster of one model answers for every name, so that programs that ask for
        another one need no change."""
        if self.clock() - self._asked_at > FRESH_SECONDS:
            self._name = (await self.client.status()).model
            self._asked_at = self.clock()
        return self._name
