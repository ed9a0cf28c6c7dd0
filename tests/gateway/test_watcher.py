"""Who looks at the page is told of the turns of a coordinator that only plays one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Self

from kvferry.client import Finished, FinishReason, SessionInfo, Started, TurnEvent
from kvferry.gateway.dashboard import watcher as watching
from kvferry.gateway.dashboard.watcher import MAX_KEPT, Watcher


class Busy:
    """A client of a coordinator that has ever new sessions, each with one turn, which is over."""

    def __init__(self, n_sessions: int) -> None:
        self._n_sessions, self._n_told = n_sessions, 0

    async def list_sessions(self, *, limit: int) -> list[SessionInfo]:
        self._n_told = min(self._n_told + limit, self._n_sessions)
        return [SessionInfo(f"s{self._n_told - n}", "m", 0, 1, 4, 1, 1, "", "", "node-1", "") for n in range(limit)]

    def session(self, session_id: str) -> Played:
        return Played(session_id)


class Played:
    """A session and its turn."""

    def __init__(self, session_id: str) -> None:
        self.session_id, self.turn_id = session_id, f"t-{session_id}"

    def resume(self, _: str | None) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[TurnEvent]:
        yield Finished(FinishReason.END, 2, 2, "", 0.1, 1.0, 0.0, 1)


async def test_a_page_that_is_open_for_long_does_not_make_the_gateway_remember_all_sessions(monkeypatch):
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0)
    monkeypatch.setattr(watching, "MAX_FOLLOWED", MAX_KEPT)
    watcher = Watcher(Busy(10 * MAX_KEPT), lambda: 0.0)
    async with aclosing(watcher.subscribe()) as traces:
        async for trace in traces:
            if trace["session_id"] == f"s{10 * MAX_KEPT}":
                break
        assert len(watcher._seen) <= MAX_KEPT
        assert len(watcher._traces) <= MAX_KEPT


class Endless:
    """A client of a coordinator with one turn that does not end, and from which nobody gets away before he may."""

    turn_id = "t"

    def __init__(self) -> None:
        self.n_followed = self.n_looks_since = 0
        self.is_leaving, self.may_leave = asyncio.Event(), asyncio.Event()
        self.is_followed_anew, self.looked_since = asyncio.Event(), asyncio.Event()

    async def list_sessions(self, *, limit: int) -> list[SessionInfo]:
        del limit
        self.n_looks_since += self.may_leave.is_set()
        if self.n_looks_since == 3:
            self.looked_since.set()
        return [SessionInfo("s", "m", 0, 1, 4, 0, 1, self.turn_id, "", "node-1", "")]

    def session(self, _: str) -> Self:
        return self

    def resume(self, _: str | None) -> Self:
        self.n_followed += 1
        if self.n_followed == 2:
            self.is_followed_anew.set()
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_leaving.set()
        await self.may_leave.wait()

    async def __aiter__(self) -> AsyncIterator[TurnEvent]:
        yield Started(4, 0)
        await asyncio.Event().wait()


async def test_who_comes_while_the_last_reader_leaves_has_each_turn_followed_once(monkeypatch):
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0)
    client = Endless()
    watcher = Watcher(client, lambda: 0.0)
    first, second = watcher.subscribe(), watcher.subscribe()
    await anext(first)
    leaving = asyncio.create_task(first.aclose())
    await client.is_leaving.wait()
    await anext(second)
    await client.is_followed_anew.wait()
    client.may_leave.set()
    await leaving
    await client.looked_since.wait()
    assert client.n_followed == 2
    await second.aclose()
