"""Which model a request is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvferry.client import AsyncClient
from kvferry.gateway.errors import ApiError

FRESH_SECONDS: Final = 5.0
"""A model that joins the fleet is found within them; a request must not cost a call of its own."""


@dataclass(slots=True)
class Models:
    """The names that the coordinator serves, asked for now and then. `clock`: seconds that do not jump."""

    client: AsyncClient
    clock: Callable[[], float]
    _names: tuple[str, ...] = ()
    _asked_at: float = field(default=float("-inf"))

    async def names(self) -> tuple[str, ...]:
        """The first one answers those who name none."""
        return self._names if self.clock() - self._asked_at <= FRESH_SECONDS else await self.asked()

    async def asked(self) -> tuple[str, ...]:
        """Of the coordinator, who looks at the caller's API token: programs find out so whether theirs is right."""
        self._names = tuple(model.name for model in await self.client.models())
        self._asked_at = self.clock()
        return self._names

    async def find(self, asked: str) -> str:
        """The model that answers. A cluster of one answers for every name, so that programs that ask for another one
        need no change. Raises ApiError."""
        names = await self.names()
        if asked in names:
            return asked
        if not asked or len(names) == 1:
            return names[0]
        raise self.unknown(asked, names)

    async def retrieve(self, asked: str) -> str:
        """Only what is truly there. Raises ApiError."""
        names = await self.asked()
        if asked not in names:
            raise self.unknown(asked, names)
        return asked

    @staticmethod
    def unknown(asked: str, names: tuple[str, ...]) -> ApiError:
        """The refusal."""
        return ApiError(
            404, f"this cluster serves {', '.join(names)}, not {asked}", code="model_not_found", parameter="model"
        )
