"""What is left of a conversation that was deleted: snapshots that no other one has use of.

A system prompt that others share stays, and so does what a fork goes on from. Sessions are compared by their tokens as
the registry has them, in the background; what is spared by mistake is left to the store's own eviction.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

from kvferry.coordinator.conversation import History
from kvferry.coordinator.errors import RegistryUnavailable, SessionBusy, UnknownSession
from kvferry.coordinator.pictures import spans_of
from kvferry.coordinator.registry import PageKey, Registry, SessionRecord, TokenArray
from kvferry.coordinator.tenants import Sharing
from kvferry.store.lcp_index import common_prefix
from kvferry.store.vlkv3 import ContentSpan

logger = logging.getLogger(__name__)

MAX_EXPIRED_AT_ONCE: Final = 100
"""Sessions deleted in one go; the next look finds the rest."""

MAX_GONE: Final = 1_000
"""Deleted sessions that wait to be compared: a token list each."""

PAGE: Final = 500

GATHER_SECONDS: Final = 0.5
"""Sessions that are deleted together are compared with the others together."""


class RemovesSnapshots(Protocol):
    def remove(self, token_ids: TokenArray, spans: Sequence[ContentSpan], n_shared: int, namespace: str) -> None:
        """Delete what only these tokens need; the first ``n_shared`` of them are somebody else's as well."""


@dataclasses.dataclass(slots=True)
class _Gone:
    session: SessionRecord
    history: History
    # The longest prefix that a living session has in common with it.
    n_shared: int = 0


class Forgetting:
    """One per coordinator; all methods from its event loop."""

    def __init__(self, registry: Registry, store: RemovesSnapshots, sharing: Sharing, wall_ms: Callable[[], int]):
        self._registry = registry
        self._store = store
        self._sharing = sharing
        self._wall_ms = wall_ms
        self._gone: list[_Gone] = []
        self._asked = asyncio.Event()

    def deleted(self, session: SessionRecord, history: History) -> None:
        """This session, which had these tokens, is no more."""
        if len(history.token_ids) and len(self._gone) < MAX_GONE:
            self._gone.append(_Gone(session, history))
            self._asked.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._asked.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._asked.clear()
            gone, self._gone = self._gone, []
            try:
                await self._compare(gone)
            except RegistryUnavailable as e:
                logger.warning("the snapshots of %d deleted sessions are left to eviction: %s", len(gone), e)
                continue
            for one in gone:
                spans, namespace = spans_of(one.history.pictures), self._namespace(one.session)
                self._store.remove(one.history.token_ids, spans, one.n_shared, namespace)

    async def _compare(self, gone: Sequence[_Gone]) -> None:
        began_ms = self._wall_ms()
        async for session in self._sessions(since_ms=0):
            await self._compare_with(session, gone)
        # used meanwhile, a session may have moved from a page to come to one that was past
        async for session in self._sessions(since_ms=began_ms):
            await self._compare_with(session, gone)

    async def _compare_with(self, session: SessionRecord, gone: Sequence[_Gone]) -> None:
        alike = [one for one in gone if self._kind(one.session) == self._kind(session)]
        if not alike:
            return
        with contextlib.suppress(UnknownSession):
            token_ids = await self._registry.session_tokens(session.session_id)
            for one in alike:
                one.n_shared = max(one.n_shared, common_prefix(one.history.token_ids, token_ids))

    async def _sessions(self, since_ms: int) -> AsyncIterator[SessionRecord]:
        """Those used since, the latest first."""
        after: PageKey | None = None
        while page := await self._registry.list_sessions(PAGE, after):
            for session in page:
                if session.updated_at_ms < since_ms:
                    return
                yield session
            after = PageKey(updated_at_ms=page[-1].updated_at_ms, session_id=page[-1].session_id)

    def _kind(self, session: SessionRecord) -> tuple[str, str]:
        """Sessions of different kinds have no rows in common."""
        return session.tokenizer_digest, self._namespace(session)

    def _namespace(self, session: SessionRecord) -> str:
        return self._sharing.namespace(session.tenant)


class DeletesSessions(Protocol):
    async def delete_session(self, session_id: str, only_if: Callable[[SessionRecord], bool]) -> bool:
        """Unless somebody uses it, or it does not hold any more; whether it is gone."""


async def expire(registry: Registry, turns: DeletesSessions, now_ms: int, before_ms: int) -> int:
    """Delete what nobody used since ``before_ms``, or for as long as it says itself, some at a time.

    Returns how many. Raises RegistryUnavailable.
    """
    n_deleted = 0
    for session_id in await registry.expired_sessions(now_ms, before_ms, MAX_EXPIRED_AT_ONCE):
        # it may have been used or deleted since it was listed
        with contextlib.suppress(UnknownSession, SessionBusy):
            n_deleted += await turns.delete_session(session_id, lambda session: session.is_expired(now_ms, before_ms))
    return n_deleted
