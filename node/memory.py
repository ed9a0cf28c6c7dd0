"""The rows in this node's memory: who has which, who shares them, and who lets go. Used by the engine thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvPool, KvSequence
from kvferry.engine.scheduler import Room
from kvferry.engine.vision.placed import Images
from kvferry.node.load import Totals
from kvferry.node.ports import CoreLimits, IoPort
from kvferry.node.prompt_ends import PromptEnds
from kvferry.node.publishing import Publisher, fork_rows
from kvferry.node.sessions import Resident, ResidentSessions, RowOwner, n_shared

log = logging.getLogger(__name__)


class RowMemory:
    """Idle sessions under the pool's budget, and the publisher that saves them. `running` names the sessions that
    run."""

    def __init__(
        self,
        *,
        pool: KvPool,
        new_sequence: Callable[[], KvSequence],
        io: IoPort | None,
        limits: CoreLimits,
        running: Callable[[], Iterable[RowOwner]],
        totals: Totals,
    ) -> None:
        self.sessions = ResidentSessions()
        self.ends = PromptEnds()
        self.publisher = Publisher(
            io=io,
            block_size=pool.geometry.block_size,
            row_bytes=pool.block_bytes // pool.geometry.block_size,
            ends=self.ends,
            min_growth=limits.publish_min_tokens,
            saves_images=limits.saves_images,
            owners=self.owners,
            totals=totals,
        )
        self._pool = pool
        self._new_sequence = new_sequence
        self._io = io
        self._max_sessions = limits.max_sessions
        self._running = running

    def owners(self, session_id: str) -> Iterator[RowOwner]:
        """Who has rows of a session: the idle one, and its run."""
        resident = self.sessions.get(session_id)
        if resident is not None:
            yield resident
        yield from (run for run in self._running() if run.session_id == session_id)

    def rows_for(
        self, session_id: str, token_ids: NDArray[np.int32], n_most: int, namespace: str = "", images: Images = ()
    ) -> tuple[KvSequence, int]:
        """A sequence with the longest prefix that memory has (at most n_most rows), and how many of them are published.

        Whoever's rows they are, they are of the same namespace.

        The session's own rows are taken over, or dropped when others help more: the request's tokens are the authority.
        """
        wanted = token_ids[:n_most]
        match = self.sessions.best_match(wanted, session_id, namespace, images)
        source: RowOwner | None = match[0] if match else None
        n_common = match[1] if match else 0
        for run in self._running():
            n_of_run = n_shared(run, wanted, namespace, images)
            if n_of_run > n_common:
                source, n_common = run, n_of_run
        own = self.sessions.take(session_id)
        if source is None:
            sequence, n_published = self._new_sequence(), 0
        elif source is own and n_common == own.sequence.n_rows:
            return own.sequence, own.n_published
        else:
            sequence, n_published = (
                fork_rows(source.sequence, n_common, self._pool.geometry.block_size),
                source.n_published,
            )
            self.sessions.touch(source.session_id)
        if own is not None:
            own.sequence.release()
        return sequence, min(n_published, sequence.n_rows)

    def whole_blocks_for(
        self, session_id: str, token_ids: NDArray[np.int32], namespace: str, images: Images
    ) -> tuple[KvSequence, int] | None:
        """An idle session's rows that a request may share, in whole blocks; those of running ones are the scheduler's
        to share."""
        match = self.sessions.best_match(token_ids, session_id, namespace, images)
        if match is None:
            return None
        resident, n_common = match
        self.sessions.touch(resident.session_id)
        return resident.sequence, n_common - n_common % self._pool.geometry.block_size

    def keep(self, resident: Resident) -> None:
        """Make a session resident, and let the oldest go when there are too many."""
        self.sessions.keep(resident)
        while len(self.sessions) > self._max_sessions:
            oldest = self.sessions.oldest()
            if oldest is not None:
                self._evict(oldest)

    def drop(self, session_id: str) -> None:
        """Forget an idle session."""
        resident = self.sessions.take(session_id)
        if resident is not None:
            resident.sequence.release()

    def make_room(self, n_blocks: int) -> Room:
        """Free that many more blocks by letting idle sessions go, the least recently used first."""
        n_wanted = self._pool.n_free_blocks + n_blocks
        while self._pool.n_free_blocks + self.publisher.n_blocks_coming < n_wanted:
            oldest = self.sessions.oldest()
            if oldest is None:
                break
            self._evict(oldest)
        if self._pool.n_free_blocks >= n_wanted:
            return "free"
        if self._io is None or not self.publisher.n_asked:
            return "never"
        if self._io.writes_stalled():  # rows that wait to be saved would wait for ever
            return "later" if self.publisher.drop_waiting() else "never"
        return "later"

    def save_all(self) -> None:
        """Publish every idle session that is not in the store yet."""
        for resident in list(self.sessions):
            if resident.n_unpublished > 0 and self.publisher.can_save(resident):
                self.publisher.publish_fork(resident)

    def n_saved(self) -> int:
        """Idle sessions whose rows are in the store."""
        return sum(resident.n_unpublished <= 0 for resident in self.sessions)

    def _evict(self, victim: Resident) -> None:
        """Let a session go, saved first: if that fails it is gone all the same."""
        self.sessions.take(victim.session_id)
        log.info(
            "session %s leaves memory (%d rows)", victim.session_id, len(victim.token_ids),
            extra={"session_id": victim.session_id},
        )  # fmt: skip
        if (
            self.publisher.is_worth(victim)
            and not victim.publish_failed
            and not self.publisher.is_asked(victim.session_id)
        ):
            self.publisher.publish_last(victim)
        else:
            victim.sequence.release()
