"""Who looks at the page is told of the turns of a coordinator that only plays one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Self

from kvferry.client import Finished, FinishReason, SessionInfo, TurnEvent
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
