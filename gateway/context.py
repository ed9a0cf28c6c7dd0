"""What every request of one gateway shares."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request

from kvferry.client import AsyncClient, ClientError
from kvferry.gateway.dashboard.state import Dashboard
from kvferry.gateway.models import Models


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Made once; where ids, seeds and times come from is given, so that a test can repeat them."""

    client: AsyncClient
    models: Models
    dashboard: Dashboard
    # Sessions without use are forgotten after so long: of requests that bring their whole history; of responses, which
    # are asked for by name.
    keep_seconds: int
    keep_responses_seconds: int
    new_id: Callable[[], str]
    new_seed: Callable[[], int]
    wall_clock: Callable[[], float]
    _jobs: set[asyncio.Task[None]] = field(default_factory=set)

    def in_background(self, job: Coroutine[None, None, object]) -> asyncio.Task[None]:
        """Do what no client waits for, as long as we live: read an answer, which would be ended if nobody did for a
        while, or end one."""
        task = asyncio.create_task(_quietly(job))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    def stop(self) -> None:
        """The process ends; the answers go on."""
        for task in self._jobs:
            task.cancel()


async def _quietly(job: Coroutine[None, None, object]) -> None:
    with contextlib.suppress(ClientError):  # whoever asks for the answer is told; what could not be deleted expires
        await job


def context_of(request: Request) -> Context:
    """Of the application that serves the request."""
    return cast("Context", request.app.state.context)
