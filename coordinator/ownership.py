"""What a caller with an API token may touch: its tenant's sessions, and so many open turns.

Whoever has no token, since none is needed, may touch all.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from kvferry.coordinator import requests
from kvferry.coordinator.errors import UnknownSession
from kvferry.coordinator.registry import PageKey, Registry, SessionRecord
from kvferry.coordinator.samples import Key
from kvferry.trust.caller import calling
from kvferry.trust.errors import PermissionDenied, TooManyTurns

LOOK_AT: Final = 200
"""Sessions of all tenants that are looked at at once to find those of one."""

TRY_AGAIN_MS: Final = 1_000


class Ownership:
    """Event loop only. ``is_open``: whether a turn is alive here."""

    def __init__(self, registry: Registry, is_open: Callable[[Key], bool]) -> None:
        self._registry, self._is_open = registry, is_open
        self._turns: dict[str, set[Key]] = {}  # by token
        self._beginning: Counter[str] = Counter()

    async def check(self, session_id: str) -> None:
        """Raises UnknownSession, with the same words, for one that is not there and for one of another tenant."""
        tenant = calling().tenant
        if tenant is not None and (await self._registry.get_session(session_id)).tenant != tenant:
            raise UnknownSession(f"there is no session {session_id}")

    @staticmethod
    def tenant(asked: str) -> str:
        """Whose a new session is. Raises PermissionDenied for somebody else's."""
        tenant = calling().tenant
        if tenant is None:
            return asked
        if asked not in {"", tenant}:
            raise PermissionDenied(f"this API token is for tenant {tenant}, it makes no sessions of {asked}")
        return tenant

    async def sessions(self, n: int, after: PageKey | None) -> list[SessionRecord]:
        """Most recently used first, at most ``n``."""
        tenant = calling().tenant
        if tenant is None:
            return await self._registry.list_sessions(n, after)
        found: list[SessionRecord] = []
        while len(found) < n and (page := await self._registry.list_sessions(LOOK_AT, after)):
            found += [session for session in page if session.tenant == tenant]
            after = requests.key_of(page[-1])
        return found[:n]

    @contextlib.contextmanager
    def beginning(self, key: Key, n: int) -> Iterator[None]:
        """While ``n`` turns begin, of which the first is ``key``. Raises TooManyTurns."""
        token = calling().token
        if token is None or token.concurrent_turns is None or key in self._turns.get(token.id, ()):
            yield
            return
        self._turns[token.id] = {turn for turn in self._turns.get(token.id, ()) if self._is_open(turn)}
        if len(self._turns[token.id]) + self._beginning[token.id] + n > token.concurrent_turns:
            raise TooManyTurns(
                f"the API token {token.id} may have {token.concurrent_turns} turns open at once: ask again when one "
                "has ended",
                retry_after_ms=TRY_AGAIN_MS,
            )
        self._beginning[token.id] += n
        try:
            yield
        finally:
            self._beginning[token.id] -= n

    def began(self, keys: list[Key]) -> None:
        """These are the caller's turns."""
        token = calling().token
        if token is not None and token.concurrent_turns is not None:
            self._turns.setdefault(token.id, set()).update(keys)
