"""Where sessions lie, remembered until they change: asking costs the coordinator a look at all their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvferry.client import AsyncClient, ClientError, SessionInfo, SessionPlaces

MAX_SESSIONS: Final = 24
"""Of the latest; more would be no picture."""

KEEP_MS: Final = 10_000
"""A file may come or go without the session's doing."""

SOON_MS: Final = 1_000
"""A session that is not stored yet is about to be."""

Kept = tuple[int, float, SessionPlaces]
"""Last change of the session and when we asked (ms since 1970), and what we were told."""


class Whereabouts:
    """Of the sessions that were used last."""

    def __init__(self, client: AsyncClient, now_ms: Callable[[], float]) -> None:
        self._client = client
        self._now_ms = now_ms
        self._kept: dict[str, Kept] = {}  # by session

    async def in_store(self) -> list[dict[str, Any]]:
        """The caller's sessions, each with the last file of its chain; none where sessions may not be listed."""
        try:
            sessions = await self._client.list_sessions(limit=MAX_SESSIONS)
        except ClientError:
            return []
        found = await self._places_of(sessions)
        return [
            {"session_id": session.session_id, "tenant": session.tenant, "file": rows.files[-1].name}
            | {"fingerprint": rows.fingerprint, "n_tokens": rows.n_tokens}
            for session, places in zip(sessions, found, strict=True)
            if places is not None
            for rows in places.stored
            if rows.files
        ]

    async def _places_of(self, sessions: Sequence[SessionInfo]) -> list[SessionPlaces | None]:
        """None of one that was deleted meanwhile."""
        found = await asyncio.gather(*map(self._place_of, sessions))
        now_ms = self._now_ms()
        listed = {session.session_id for session in sessions}
        # callers with other tokens have sessions of their own
        self._kept = {name: kept for name, kept in self._kept.items() if name in listed or now_ms - kept[1] <= KEEP_MS}
        return found

    async def _place_of(self, session: SessionInfo) -> SessionPlaces | None:
        kept = self._kept.get(session.session_id)
        if kept is not None and self._is_fresh(kept, session):
            return kept[2]
        try:
            places = await self._client.session(session.session_id).locate()
        except ClientError:
            return None
        self._kept[session.session_id] = session.updated_at_ms, self._now_ms(), places
        return places

    def _is_fresh(self, kept: Kept, session: SessionInfo) -> bool:
        changed_ms, asked_ms, places = kept
        return changed_ms == session.updated_at_ms and self._now_ms() - asked_ms <= (
            KEEP_MS if places.stored else SOON_MS
        )
