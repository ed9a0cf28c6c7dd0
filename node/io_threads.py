"""The two threads that touch the store, which may hang at any call: nobody ever waits for them without a deadline.

One reads and one writes, so that a turn that waits for its rows never waits for somebody's save. A publish that still
waits is replaced by a newer one of the same session.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import OutOfKvMemory
from kvferry.engine.kv_cache import KvPool, KvSequence
from kvferry.engine.vision.placed import Images
from kvferry.node.errors import StoreDown
from kvferry.node.io_lane import IoLane
from kvferry.node.messages import PublishDone, Published, PublishRequest, RestoreDone, RestoreRequest, StoreNews
from kvferry.node.refusals import refused_prefixes
from kvferry.node.staged_rows import RestoreAbandoned, StagedRows
from kvferry.node.tenant_stores import TenantStores
from kvferry.store.errors import (
    SnapshotGone,
    SnapshotRejected,
    StoreError,
    StoreFull,
    StoreUnavailable,
    WriteBudgetSpent,
)
from kvferry.store.snapshot_store import Match, SnapshotStore
from kvferry.store.vlkv3 import ContentSpan
from kvferry.telemetry.logs import log_with

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1024
"""Requests that may wait. Their rows are forks, which share the pool's blocks, so the pool bounds their memory."""

MAX_TRIES: Final = 4
"""Snapshots that one restore may find damaged or gone before the rows are computed: each costs reading a file."""

MAX_REFUSALS: Final = 8
"""Refused snapshots that one turn reports."""

UPKEEP_SECONDS: Final = 30.0
"""Between two looks for chains that are too long; only while nothing waits to be saved."""

NOT_OPEN: Final = "the store is not open yet"


def spans_of(images: Images) -> list[ContentSpan]:
    """Images as the store knows them."""
    return [ContentSpan(image.start, image.n_tokens, image.content_hash) for image in images]


class IoThreads:
    """Own the store. All public methods may be used by any thread; answers go to `deliver`, called on the thread that
    did the work."""

    def __init__(
        self,
        *,
        open_store: Callable[[str], SnapshotStore],
        new_sequence: Callable[[], KvSequence],
        deliver: Callable[[RestoreDone | PublishDone], None],
        stall_seconds: float,
        pool: KvPool | None = None,
    ) -> None:
        """``open_store``: of a namespace, without I/O. ``pool``: of the sequences, so that whole blocks are read and
        written where they lie."""
        self._pool = pool
        self._open_store = open_store
        self._new_sequence = new_sequence
        self._deliver = deliver
        self._stall_seconds = stall_seconds
        self._stores: TenantStores | None = None
        self._is_starting = True
        self._fatal: StoreError | None = None
        self._passing: list[StoreError] = []  # what stood in the way of opening, and may pass
        self._read_error = NOT_OPEN
        self._write_error = NOT_OPEN
        self.store_id = ""  # until the store has told
        self._is_prepared = False  # what crashes left is gone, and the store has told its id
        self._seal_name = ""
        self._looked_after_at = time.monotonic()
        self._full: StoreFull | None = None  # what the last save met
        self._reads: IoLane[RestoreRequest] = IoLane(
            "kvferry-io-read",
            open_first=self._probe_reads,
            serve=lambda request: deliver(self._restore(request)),
            probe=self._probe_reads,
            stall_seconds=stall_seconds,
        )
        self._writes: IoLane[PublishRequest] = IoLane(
            "kvferry-io-write",
            open_first=self._probe_writes,
            serve=lambda request: deliver(self._publish(request)),
            probe=self._probe_writes,
            stall_seconds=stall_seconds,
        )

    def start(self) -> None:
        """Open the store; returns when that is done or takes too long. Raises StoreError when a person has to act."""
        self._stores = TenantStores(self._open_store)  # does no I/O yet
        self._seal_name = self._stores.common.seal_name
        deadline = time.monotonic() + self._stall_seconds
        for lane in (self._writes, self._reads):
            lane.start()
        for lane in (self._writes, self._reads):
            lane.opened.wait(max(deadline - time.monotonic(), 0.0))
        self._is_starting = False
        if self._fatal is not None:
            self.close(0.0)
            raise self._fatal
        for error in self._passing:
            log.warning("serving without the store: %s", error)

    def close(self, timeout: float) -> bool:
        """Let the running requests end; False when they did not within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        lanes = (self._reads, self._writes)
        for lane in lanes:
            lane.end()
        ended = [lane.join(max(deadline - time.monotonic(), 0.0)) for lane in lanes]
        return all(ended)

    def submit(self, request: RestoreRequest | PublishRequest) -> PublishRequest | None:
        """Queue a request; returns one that will not be answered: a replaced older one, or this when the queue is
        full."""
        if isinstance(request, RestoreRequest):
            self._reads.submit(request)
            return None
        waiting = self._writes.waiting
        with self._writes.lock:
            older = next((r for r in waiting if r.session_id == request.session_id), None)
            if older is None and len(waiting) >= MAX_WAITING:
                return request
            if older is not None:
                waiting.remove(older)
            self._writes.submit(request)
            return older

    def drop_waiting(self) -> list[PublishRequest]:
        """Take back all publishes that have not begun."""
        with self._writes.lock:
            dropped = list(self._writes.waiting)
            self._writes.waiting.clear()
            return dropped

    def reads_stalled(self) -> bool:
        """Whether the running restore has shown no progress for too long."""
        return self._reads.stalled_on() is not None

    def writes_stalled(self) -> bool:
        """Whether the running publish has shown no progress for too long."""
        return self._writes.stalled_on() is not None

    def error(self) -> str:
        """What is wrong with the store, a sentence; empty when nothing is."""
        stalled = self._reads.stalled_on() or self._writes.stalled_on()
        if stalled is not None:
            what, seconds = stalled
            return f"the store has not answered for {seconds:.0f} s ({what}); check its disk or mount"
        return self._read_error or self._write_error

    def news(self) -> StoreNews:
        """For the coordinator, and metrics; does no I/O."""
        statistics = None if self._stores is None else self._stores.statistics()
        return StoreNews(self.store_id, self._seal_name, self.error(), statistics)

    def readable(self) -> bool:
        """Whether asking for a restore makes sense now."""
        return not self._read_error and not self.reads_stalled()

    # Opening, and looking whether a failed store is back: each thread for its own side.

    def _probe_writes(self) -> None:
        """See whether the store can be written to, and look after it while there is nothing else to do."""
        if self._stores is None:
            return
        if self._is_prepared and not (self._write_error or self._read_error):  # a save may have found it back first
            self._look_after(self._stores)
            return
        store = self._stores.common
        with self._writes.working("looking whether it can be written to"):
            try:
                store.reap()  # writes, and makes the directory again should it be gone
                self.store_id = store.identify()
                store.refresh()
                self._stores.unprepare()
                self._is_prepared = True
                if self._full is None or self._has_room(store, self._full):
                    self._write_error, self._full = "", None
            except StoreError as error:
                self._write_error = str(error)
                self._cannot_open(error)

    @staticmethod
    def _has_room(store: SnapshotStore, full: StoreFull) -> bool:
        """Whether somebody made room on the disk. That another limit is not met any more only a save can show."""
        return 0 < full.needed_bytes <= store.free_bytes()

    def _look_after(self, stores: TenantStores) -> None:
        """Merge one long chain, now and then: a save that comes meanwhile waits for no more than that."""
        now = time.monotonic()
        if now < self._looked_after_at + UPKEEP_SECONDS:
            return
        self._looked_after_at = now
        with self._writes.working("merging the segments of a long chain"):
            try:
                merging = (store.compact(self._writes.tell, most_chains=1) for store in stores.all())
                n_merged = next(filter(None, merging), 0)
            except StoreError as error:
                log.warning("a long chain of segments stays as it is: %s", error)
            else:
                if n_merged:
                    log.info("%d segments of a long chain became one", n_merged)

    def _probe_reads(self) -> None:
        """See whether the store can be read."""
        if self._stores is None or not self._read_error:
            return
        with self._reads.working("looking whether it can be read"):
            try:
                self._stores.common.refresh()
                self._read_error = ""
            except StoreError as error:
                self._read_error = str(error)
                self._cannot_open(error)

    def _cannot_open(self, error: StoreError) -> None:
        """Before the node serves, what a person has to act on stops the start; all else is served without."""
        if self._writes.opened.is_set() and self._reads.opened.is_set():
            return
        if not self._is_starting:  # it took too long: we serve already
            log.warning("serving without the store: %s", error)
        elif error.recovery in {"page_operator", "refuse"}:
            self._fatal = error
        else:
            self._passing.append(error)  # told once it is known that nothing worse stands in the way

    # Restores.

    def _restore(self, request: RestoreRequest) -> RestoreDone:
        """Read the longest prefix that is there and whole. Whatever fails, the rows can be computed."""
        refused: list[str] = []
        done = RestoreDone(request=request)
        log_with(session_id=request.session_id)
        with self._reads.working("restoring a session") as began_at:
            try:
                if self._stores is not None and not request.abandoned:
                    store = self._stores.of(request.namespace)
                    refused += self._look_again(store, request)
                    done = self._restore_best(store, request, refused, began_at)
                    self._read_error = ""
            except (RestoreAbandoned, OutOfKvMemory) as error:
                log.warning("a restore was given up: %s", error)
            except StoreError as error:
                log.warning("rows are recomputed: %s", error)
                if isinstance(error, StoreUnavailable):
                    self._read_error = str(error)
            except Exception:  # a bug in reading a file must not cost the answer
                log.exception("a restore failed for an unforeseen reason; rows are recomputed")
        return dataclasses.replace(done, refused=tuple(dict.fromkeys(refused)))

    def _look_again(self, store: SnapshotStore, request: RestoreRequest) -> list[str]:
        """Take in what other nodes published; returns what was refused of that, and what this request misses
        thereby."""
        report = store.refresh()
        self._reads.tell()
        refused = store.refused()
        news = [f"{name}: {refused[name]}" for name in report.refused[:MAX_REFUSALS] if name in refused]
        segments = [
            f"{name}: {why}" for name, why in store.refused_of(request.token_ids, spans_of(request.images)).items()
        ]
        return news + (refused_prefixes(request.token_ids, refused) + segments)[-MAX_REFUSALS:]

    def _restore_best(
        self, store: SnapshotStore, request: RestoreRequest, refused: list[str], started_at: float
    ) -> RestoreDone:
        for _ in range(MAX_TRIES):
            match = store.find(request.token_ids, request.n_rows_at_least, spans_of(request.images))
            if match is None or request.abandoned:
                break
            known = store.refused()
            try:
                done = self._read(store, match, request, started_at)
            except SnapshotRejected as error:
                log.warning("rows are recomputed: %s", error)
                refused.append(f"{match.name}: {error.reason}")
            except SnapshotGone:
                log.info("snapshot %s went away before it was read", match.name)
            else:  # a chain may be damaged further on: what lies before the damage is of use
                refused += [f"{name}: {why}" for name, why in store.refused().items() if name not in known]
                return done
        return RestoreDone(request=request)

    def _read(self, store: SnapshotStore, match: Match, request: RestoreRequest, started_at: float) -> RestoreDone:
        logits = self._logits(store, match, request)
        n_rows = match.n_common if logits is not None else min(match.n_common, request.n_rows_at_most)
        sequence = self._new_sequence()
        try:
            n_rows = store.restore_usable(
                match, n_rows, StagedRows(self._pool, sequence, self._reads.tell, request, n_rows)
            )
            sequence.commit(n_rows)
        except BaseException:
            sequence.release()
            raise
        return RestoreDone(
            request=request,
            sequence=sequence,
            logits=logits if n_rows == len(request.token_ids) else None,
            snapshot=match.name,
            n_bytes=n_rows * store.bytes_per_row,
            seconds=time.monotonic() - started_at,
        )

    def _logits(self, store: SnapshotStore, match: Match, request: RestoreRequest) -> NDArray[np.float32] | None:
        """Those of the request's last token, when the snapshot ends there and has them."""
        if not request.wants_logits or match.n_common < len(request.token_ids):
            return None
        logits = store.logits(match)
        self._reads.tell()
        return logits if logits is not None and len(logits) == store.vocab_size else None

    # Publishing.

    def _publish(self, request: PublishRequest) -> PublishDone:
        if self._stores is None:
            return PublishDone(request=request, error=StoreDown(self._write_error))
        log_with(session_id=request.session_id)
        with self._writes.working("publishing a session") as began_at:
            try:
                rows = StagedRows(self._pool, request.sequence, self._writes.tell)
                store = self._stores.prepared(request.namespace)
                info = store.publish(request.token_ids, rows, spans=spans_of(request.images), logits=request.logits)
            except StoreError as error:
                spared = isinstance(error, WriteBudgetSpent)  # by this node's own wish, for an hour at most
                if isinstance(error, StoreUnavailable | StoreFull) and not spared:  # else only this one is not wanted
                    self._write_error, self._full = str(error), error if isinstance(error, StoreFull) else None
                log.warning("session %s was not saved: %s", request.session_id, error)
                return PublishDone(request=request, error=error)
            except Exception as error:  # a bug in writing a file must not cost the session
                log.exception("session %s was not saved for an unforeseen reason", request.session_id)
                return PublishDone(request=request, error=error)
        self._write_error, self._full = "", None
        published = Published(info.name, info.n_tokens, info.n_bytes, time.monotonic() - began_at, request.namespace)
        return PublishDone(request=request, published=published, already_there=info.already_there)
