"""Follows the turns of the cluster while somebody looks at the page, and tells all who look."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from kvferry.client import AsyncClient, AsyncTurn, ClientError, Finished, SessionInfo, Token
from kvferry.gateway.dashboard.traces import Trace
from kvferry.trust.bearer import Secret

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""How often new turns are looked for: a person does not see them sooner."""

TELL_SECONDS: Final = 0.1
"""How often a running turn's picture changes."""

MAX_KEPT: Final = 100
MAX_FOLLOWED: Final = 32
MAX_UNREAD: Final = 200
"""Pictures that wait for a slow page; beyond it the page gets the newest of all when it reads again."""


class Watcher:
    """Works between the first `subscribe` and the end of the last one. Event loop only. `now_ms`: since 1970."""

    def __init__(self, client: AsyncClient, now_ms: Callable[[], float]) -> None:
        self._client = client
        self._now_ms = now_ms
        self._traces: OrderedDict[tuple[str, str], Trace] = OrderedDict()
        self._readers: set[asyncio.Queue[Trace]] = set()
        self._following: dict[str, asyncio.Task[None]] = {}  # by session
        self._seen: dict[str, int] = {}  # session → time of its last change
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Nobody looks."""
        return not self._readers

    async def subscribe(self) -> AsyncGenerator[dict[str, Any]]:
        """The latest turns, then each as it changes."""
        queue: asyncio.Queue[Trace] = asyncio.Queue(MAX_UNREAD)
        self._readers.add(queue)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="dashboard")
        try:
            for trace in list(self._traces.values()):
                yield trace.as_json()
            while True:
                yield (await queue.get()).as_json()
        finally:
            self._readers.discard(queue)
            if not self._readers:
                await self.stop()

    async def stop(self) -> None:
        """Nobody looks any more."""
        tasks = [task for task in (self._looking, *self._following.values()) if task is not None]
        self._looking = None
        self._following.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(ClientError):  # the page shows by itself that the coordinator is away
                listed = await self._client.list_sessions(limit=MAX_KEPT)
                for session in listed:
                    self._consider(session)
                self._seen = {s.session_id: self._seen[s.session_id] for s in listed if s.session_id in self._seen}
            await asyncio.sleep(LOOK_SECONDS)

    def _consider(self, session: SessionInfo) -> None:
        is_new = self._seen.get(session.session_id) != session.updated_at_ms
        if session.session_id in self._following or len(self._following) >= MAX_FOLLOWED:
            return
        if session.open_turn_id or (is_new and session.n_turns):
            self._seen[session.session_id] = session.updated_at_ms
            task = asyncio.create_task(self._follow(session), name=f"watch {session.session_id}")
            self._following[session.session_id] = task
            task.add_done_callback(lambda task: self._followed(session.session_id, task))

    def _followed(self, session_id: str, task: asyncio.Task[None]) -> None:
        if self._following.get(session_id) is task:  # else it was stopped, and who looks since has one of his own
            del self._following[session_id]

    async def _follow(self, session: SessionInfo) -> None:
        turn = self._client.session(session.session_id).resume(session.open_turn_id or None)
        trace = Trace(session.session_id, session.open_turn_id, self._now_ms())
        try:
            async with turn:
                await self._read(turn, trace, session)
        except ClientError as error:
            log.debug("turn of session %s is not shown: %s", session.session_id, error)

    async def _read(self, turn: AsyncTurn, trace: Trace, session: SessionInfo) -> None:
        was_over, told_ms = not session.open_turn_id, 0.0
        async for event in turn:
            now_ms = self._now_ms()
            trace.turn_id = trace.turn_id or turn.turn_id
            trace.push(event, now_ms)
            if isinstance(event, Finished) and was_over:
                if (trace.session_id, trace.turn_id) in self._traces:  # seen while it ran, which tells more
                    return
                trace.lay_out(event, float(session.updated_at_ms))
            if was_over and not isinstance(event, Finished):
                continue
            if not isinstance(event, Token) or now_ms - told_ms > TELL_SECONDS * 1000:
                self._tell(trace)
                told_ms = now_ms

    def _tell(self, trace: Trace) -> None:
        key = trace.session_id, trace.turn_id
        self._traces[key] = trace
        self._traces.move_to_end(key)
        while len(self._traces) > MAX_KEPT:
            self._traces.popitem(last=False)
        for queue in self._readers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(trace)


class Watchers:
    """One watcher per API token: who looks with a token sees what its tenant sees, and nobody else's turns."""

    def __init__(self, client: AsyncClient, now_ms: Callable[[], float]) -> None:
        self._client, self._now_ms = client, now_ms
        self._watchers: dict[Secret | None, Watcher] = {}

    def of(self, token: Secret | None) -> Watcher:
        """Its reader has to come in the context of a request with that token."""
        if token not in self._watchers:
            self._watchers = {of: watcher for of, watcher in self._watchers.items() if not watcher.is_idle}
            self._watchers[token] = Watcher(self._client, self._now_ms)
        return self._watchers[token]
