"""Where sessions lie, as several callers ask at once: each has an API token, and sessions, of his own."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter

from kvferry.client import SessionInfo, SessionPlaces
from kvferry.client.errors import UnknownSession
from kvferry.client.sdk.stored import StoredFile, StoredRows
from kvferry.gateway.dashboard.whereabouts import KEEP_MS, Whereabouts

caller = contextvars.ContextVar("caller", default="")


class Tenants:
    """A client of a coordinator that lists each caller's sessions; `hold`: a look at this one does not end yet."""

    def __init__(self, **sessions: list[str]) -> None:
        self.sessions = sessions
        self.asked: Counter[str] = Counter()
        self.hold, self.is_held, self.go_on = "", asyncio.Event(), asyncio.Event()

    async def list_sessions(self, *, limit: int) -> list[SessionInfo]:
        names = self.sessions[caller.get()][:limit]
        return [SessionInfo(name, "m", 0, 1, 8, 1, 1, "", "", "node-1", "") for name in names]

    def session(self, session_id: str) -> Located:
        return Located(self, session_id)


class Located:
    """A session that is stored in one file; one named `gone` was deleted since it was listed."""

    def __init__(self, tenants: Tenants, session_id: str) -> None:
        self._tenants, self._session_id = tenants, session_id

    async def locate(self) -> SessionPlaces:
        tenants, name = self._tenants, self._session_id
        tenants.asked[name] += 1
        if name == tenants.hold:
            tenants.is_held.set()
            await tenants.go_on.wait()
        if name == "gone":
            raise UnknownSession("It is gone.")
        return SessionPlaces(8, (), (StoredRows("f", 8, (StoredFile(f"{name}.kv", 0, 8, 64, 0),)),))


async def names_for(who: str, whereabouts: Whereabouts) -> list[str]:
    caller.set(who)
    return [found["session_id"] for found in await whereabouts.in_store()]


async def test_one_callers_look_takes_nothing_from_anothers():
    tenants = Tenants(ann=["a"], bob=["b"])
    whereabouts = Whereabouts(tenants, lambda: 0.0)
    assert await names_for("ann", whereabouts) == ["a"]
    tenants.sessions["ann"], tenants.hold = ["new", "a"], "new"
    anns = asyncio.create_task(names_for("ann", whereabouts))
    await tenants.is_held.wait()
    assert await names_for("bob", whereabouts) == ["b"]
    tenants.go_on.set()
    assert await anns == ["new", "a"]
    assert tenants.asked == {"a": 1, "b": 1, "new": 1}


async def test_what_nobody_lists_is_forgotten_and_what_is_gone_is_left_out():
    now = [0.0]
    tenants = Tenants(ann=["a", "gone"], bob=["b"])
    whereabouts = Whereabouts(tenants, lambda: now[0])
    assert await names_for("ann", whereabouts) == ["a"]
    now[0] += KEEP_MS + 1
    assert await names_for("bob", whereabouts) == ["b"]
    assert set(whereabouts._kept) == {"b"}
