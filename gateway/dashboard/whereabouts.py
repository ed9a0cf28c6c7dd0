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


class Whereabouts:
    """Of the sessions that were used last."""

    def __init__(self, client: AsyncClient, now_ms: Callable[[], float]) -> None:
        self._client = client
        self._now_ms = now_ms
        self._kept: dict[str, tuple[int, float, SessionPlaces]] = {}  # by session: its last change, asked at

    async def in_store(self) -> list[dict[str, Any]]:
        """The caller's sessions, each with the last file of its chain; none where sessions may not be listed."""
        try:
            sessions = await self._client.list_sessions(limit=MAX_SESSIONS)
        except ClientError:
            return []
        await self._look(sessions)
        self._kept = {s.session_id: self._kept[s.session_id] for s in sessions if s.session_id in self._kept}
        return [
            {"session_id": session.session_id, "tenant": session.tenant, "file": rows.files[-1].name}
            | {"fingerprint": rows.fingerprint, "n_tokens": rows.n_tokens}
            for session in sessions
            if session.session_id in self._kept
            for rows in self._kept[session.session_id][2].stored
            if rows.files
        ]

    async def _look(self, sessions: Sequence[SessionInfo]) -> None:
        stale = [session for session in sessions if self._is_stale(session)]
        found = await asyncio.gather(*(self._locate(session) for session in stale))
        for session, places in zip(stale, found, strict=True):
            if places is not None:
                self._kept[session.session_id] = session.updated_at_ms, self._now_ms(), places

    async def _locate(self, session: SessionInfo) -> SessionPlaces | None:
        try:
            return await self._client.session(session.session_id).locate()
        except ClientError:  # it was deleted meanwhile
            return None

    def _is_stale(self, session: SessionInfo) -> bool:
        kept = self._kept.get(session.session_id)
        if kept is None or kept[0] != session.updated_at_ms:
            return True
        return self._now_ms() - kept[1] > (KEEP_MS if kept[2].stored else SOON_MS)
