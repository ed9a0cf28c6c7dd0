"""Having rows published: forks go to an I/O thread, answers come back. Used by the engine thread only; never waits.

A fork shares the blocks of the sequence it was made from, so the next turn may run while the rows are written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import OutOfKvMemory
from kvferry.engine.kv_cache import KvSequence
from kvferry.node.errors import StoreDown
from kvferry.node.load import Totals
from kvferry.node.messages import PublishDone, Published, PublishRequest, Reply
from kvferry.node.ports import IoPort
from kvferry.node.prompt_ends import PromptEnds, are_worth_saving
from kvferry.node.sessions import Resident, RowOwner, n_shared

MIN_ROWS: Final = 16
"""A shorter prefix is never looked for in the store (vlkv.md: an LCP of 16 is the least that is worth a load)."""

MAX_UNTOLD: Final = 1024
"""Published snapshots remembered for coordinators that were not told yet; they also find them by scanning the store."""


def fork_rows(source: KvSequence, n_rows: int, block_size: int) -> KvSequence:
    """A fork at n_rows; without memory for the copy of the last partial block, at the block boundary below it."""
    try:
        return source.fork(n_rows)
    except OutOfKvMemory:
        return source.fork(n_rows - n_rows % block_size)


class Publisher:
    """Publishes in the background, and remembers how much of each session is in the store."""

    def __init__(
        self,
        *,
        io: IoPort | None,
        block_size: int,
        row_bytes: int,
        ends: PromptEnds,
        min_growth: int,
        saves_images: bool,
        owners: Callable[[str], Iterator[RowOwner]],
        totals: Totals,
    ) -> None:
        self._published: deque[Published] = deque(maxlen=MAX_UNTOLD)
        self._n_published = 0
        self._io = io
        self._block_size = block_size
        self._row_bytes = row_bytes
        self._ends = ends
        self._min_growth = min_growth
        self._saves_images = saves_images
        self._owners = owners
        self._totals = totals
        self._asked: dict[int, PublishRequest] = {}  # not answered yet
        self._n_requests = 0
        self._lock = threading.Lock()  # guards what was published, which the event loop reads

    @property
    def n_asked(self) -> int:
        """Publishes that have not ended."""
        return len(self._asked)

    @property
    def n_blocks_coming(self) -> int:
        """Blocks that come free when the publishes have ended, at most: some may be shared with others."""
        return sum(request.n_blocks_freed for request in self._asked.values())

    def is_asked(self, session_id: str) -> bool:
        """Whether a publish of the session has not ended."""
        return any(request.session_id == session_id for request in self._asked.values())

    def is_worth(self, resident: Resident) -> bool:
        """Whether an idle session has grown enough since it was last published."""
        return (
            self.can_save(resident)
            and len(resident.token_ids) >= MIN_ROWS
            and resident.n_unpublished >= self._min_growth
        )

    def can_save(self, owner: RowOwner) -> bool:
        """Whether there is a store, and it can say what the session's rows are of."""
        return self._io is not None and (self._saves_images or not owner.images)

    def publish_fork(self, owner: RowOwner, reply: Reply[Published] | None = None) -> None:
        """Publish what a session has now; it may go on meanwhile."""
        fork = fork_rows(owner.sequence, owner.sequence.n_rows, self._block_size)
        self._publish(owner, fork, 0, reply)

    def publish_last(self, resident: Resident) -> None:
        """Publish a session that leaves memory; its rows are ours from now on."""
        self._publish(resident, resident.sequence, resident.sequence.n_blocks, None)

    def _publish(
        self, owner: RowOwner, sequence: KvSequence, n_blocks_freed: int, reply: Reply[Published] | None
    ) -> None:
        self._n_requests += 1
        token_ids = owner.tokens_with_rows()[: sequence.n_rows]
        request = PublishRequest(
            self._n_requests,
            owner.session_id,
            token_ids,
            sequence,
            n_blocks_freed,
            replies=[] if reply is None else [reply],
            images=owner.images,
            logits=self._logits_for(owner, token_ids),
            namespace=owner.namespace,
        )
        self._asked[request.request_id] = request
        if self._io is None:
            self._fail(request, "this node has no store; give it one with --store")
        elif owner.images and not self._saves_images:
            self._fail(request, "version 1 snapshots cannot say what its images show; set --store-version 3")
        elif not len(token_ids):
            self._fail(request, "there is no memory left to copy the session's rows")
        else:
            unanswered = self._io.submit(request)
            if unanswered is request:
                self._fail(request, "too many sessions wait to be saved")
            elif (
                unanswered is not None
            ):  # an older one of the same session that had not begun: this one stands for both
                request.replies.extend(unanswered.replies)
                del self._asked[unanswered.request_id]
                unanswered.sequence.release()

    def _logits_for(self, owner: RowOwner, token_ids: NDArray[np.int32]) -> NDArray[np.float32] | None:
        """Those of the last token, where it ends a prompt and they are worth their bytes."""
        logits = self._ends.find(token_ids, owner.images, owner.namespace)
        n_row_bytes = (len(token_ids) - owner.n_published) * self._row_bytes
        return logits if logits is not None and are_worth_saving(logits, n_row_bytes) else None

    def drop_waiting(self) -> bool:
        """The store hangs and memory is short: let go of rows that wait to be saved. False when none do."""
        dropped = [] if self._io is None else self._io.drop_waiting()
        for request in dropped:
            self._fail(request, "the store hangs and memory is short")
        return bool(dropped)

    def done(self, done: PublishDone) -> None:
        """Rows are in the store, or not: either way the fork goes, and the turn never hears of it."""
        request = done.request
        del self._asked[request.request_id]
        request.sequence.release()
        for owner in self._owners(request.session_id):
            if done.published is not None:
                n_common = n_shared(owner, request.token_ids, request.namespace, request.images)
                owner.n_published = max(owner.n_published, n_common)
            elif isinstance(owner, Resident):
                owner.publish_failed = True
        self._count(done)
        for reply in request.replies:
            if done.published is not None:
                reply.ok(done.published)
            else:
                reply.fail(StoreDown(f"session {request.session_id} was not saved: {done.error}"))

    def published_since(self, n_told: int) -> tuple[tuple[Published, ...], int]:
        """What was published after the first `n_told`, and how many there are to the last of it. Any thread."""
        with self._lock:
            n_new = min(self._n_published - n_told, len(self._published))
            return tuple(self._published)[len(self._published) - n_new :], self._n_published

    def _fail(self, request: PublishRequest, sentence: str) -> None:
        self.done(PublishDone(request=request, error=StoreDown(sentence)))

    def _count(self, done: PublishDone) -> None:
        if done.published is None:
            self._totals.snapshots_failed += 1
            return
        self._totals.snapshots_published += not done.already_there
        with self._lock:
            self._published.append(done.published)
            self._n_published += 1
