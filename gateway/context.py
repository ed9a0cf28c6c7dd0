"""What every request of one gateway shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from kvferry.client import AsyncClient
from kvferry.gateway.dashboard.watcher import Watcher
from kvferry.gateway.models import Models


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Made once; where ids, seeds and times come from is given, so that a test can repeat them."""

    client: AsyncClient
    models: Models
    watcher: Watcher
    may_kill: bool
    new_id: Callable[[], str]
    new_seed: Callable[[], int]
    wall_clock: Callable[[], float]


def context_of(request: Request) -> Context:
    """Of the application that serves the request."""
    return cast("Context", request.app.state.context)
