"""The one thread that touches the store, which may hang at any call: nobody ever waits for this thread without a
deadline.

Restores go first, since a turn waits for each; a publish that still waits is replaced by a newer one of the same
session.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import OutOfKvMemory
from kvferry.engine.kv_cache import KvSequence
from kvferry.node.errors import StoreDown
from kvferry.node.messages import PublishDone, Published, PublishRequest, RestoreDone, RestoreRequest
from kvferry.node.refusals import refused_prefixes
from kvferry.store.errors import SnapshotGone, SnapshotRejected, StoreError, StoreFull, StoreUnavailable
from kvferry.store.snapshot_store import Match, SnapshotStore

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1024
"""Requests that may wait. Their rows are forks, which share the pool's blocks, so the pool bounds their memory."""

PROBE_SECONDS: Final = 2.0
"""How often an idle thread looks whether a store that failed is back: well within 5 s (reliability.md, promise 12)."""

MAX_TRIES: Final = 4
"""Snapshots that one restore may find damaged or gone before the rows are computed: each costs reading a file."""

MAX_REFUSALS: Final = 8
"""Refused snapshots that one turn reports."""


class RestoreAbandoned(Exception):
    """Raised into a restore that nobody waits for any more."""


@dataclass(slots=True)
class _Progress:
    """When the thread last got anywhere; written by it, read by all."""

    working_on: str = ""  # empty: idle
    at: float = 0.0


class _Staging:
    """RowSink into a sequence, which counts nothing before commit; RowSource that shows progress."""

    def __init__(self, sequence: KvSequence, tell: Callable[[], None], request: RestoreRequest | None = None) -> None:
        self._sequence = sequence
        self._tell = tell
        self._request = request

    def write_rows(self, layer: int, start: int, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """Stage rows start.. of a layer, float32 [n, kv_dim]."""
        if self._request is not None and self._request.abandoned:
            raise RestoreAbandoned
        self._sequence.write_rows(layer, start, k, v)
        self._tell()

    def read_rows(
        self, layer: int, start: int, stop: int, k_out: NDArray[np.float32], v_out: NDArray[np.float32]
    ) -> None:
        """Copy rows start..stop-1 of a layer out, float32 [stop - start, kv_dim]."""
        self._sequence.read_rows(layer, start, stop, k_out, v_out)
        self._tell()


class IoThread:
    """Owns the store. `submit`, `drop_waiting`, `usable` and the figures may be used by any thread; the rest is
    private.

    Answers go to `deliver`, called on this thread. The thread is a daemon: a hung call must not keep the process alive.
    """

    def __init__(
        self,
        *,
        open_store: Callable[[], SnapshotStore],
        new_sequence: Callable[[], KvSequence],
        deliver: Callable[[RestoreDone | PublishDone], None],
        stall_seconds: float,
    ) -> None:
        self._open_store = open_store
        self._new_sequence = new_sequence
        self._deliver = deliver
        self._stall_seconds = stall_seconds
        self._store: SnapshotStore | None = None
        self._wakeup = threading.Condition()
        self._restores: deque[RestoreRequest] = deque()
        self._publishes: deque[PublishRequest] = deque()
        self._closing = False
        self._progress = _Progress()
        self._read_error = "the store is not open yet"
        self._write_error = ""
        self._is_full = False  # what only a save that fits can disprove
        self._opened = threading.Event()
        self._fatal: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-io", daemon=True)

    # Any thread.

    def start(self) -> None:
        """Open the store; returns when that is done or takes too long. Raises StoreError when a person has to act."""
        self._thread.start()
        self._opened.wait(self._stall_seconds)
        if self._fatal is not None:
            raise self._fatal

    def close(self, timeout: float) -> bool:
        """Let the running request end; False when it did not within `timeout` seconds."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, request: RestoreRequest | PublishRequest) -> PublishRequest | None:
        """Queue a request; returns one that will not be answered: a replaced older one, or this when the queue is
        full."""
        with self._wakeup:
            if isinstance(request, RestoreRequest):
                self._restores.append(request)
                self._wakeup.notify()
                return None
            older = next((r for r in self._publishes if r.session_id == request.session_id), None)
            if older is None and len(self._publishes) >= MAX_WAITING:
                return request
            if older is not None:
                self._publishes.remove(older)
            self._publishes.append(request)
            self._wakeup.notify()
            return older

    def drop_waiting(self) -> list[PublishRequest]:
        """Take back all publishes that have not begun."""
        with self._wakeup:
            dropped = list(self._publishes)
            self._publishes.clear()
            return dropped

    def stalled(self) -> bool:
        """Whether the running call has shown no progress for too long."""
        progress = self._progress
        return bool(progress.working_on) and time.monotonic() - progress.at > self._stall_seconds

    def error(self) -> str:
        """What is wrong with the store, a sentence; empty when nothing is."""
        if self.stalled():
            seconds = time.monotonic() - self._progress.at
            return (
                f"the store has not answered for {seconds:.0f} s ({self._progress.working_on}); check its disk or mount"
            )
        return self._read_error or self._write_error

    def readable(self) -> bool:
        """Whether asking for a restore makes sense now."""
        return not self._read_error and not self.stalled()

    # The I/O thread.

    def _run(self) -> None:
        self._open()
        self._opened.set()
        while self._fatal is None:
            request = self._next()
            if request is None:
                if self._closing:
                    return
                self._probe()
            elif isinstance(request, RestoreRequest):
                self._deliver(self._restore(request))
            else:
                self._deliver(self._publish(request))

    def _next(self) -> RestoreRequest | PublishRequest | None:
        with self._wakeup:
            if not (self._restores or self._publishes or self._closing):
                self._wakeup.wait(PROBE_SECONDS)
            if self._restores:
                return self._restores.popleft()
            return self._publishes.popleft() if self._publishes else None

    def _begin(self, what: str) -> float:
        now = time.monotonic()
        self._progress = _Progress(working_on=what, at=now)
        return now

    def _tell(self) -> None:
        self._progress.at = time.monotonic()

    def _open(self) -> None:
        self._begin("opening it")
        try:
            store = self._open_store()
            store.reap()
            store.refresh()
        except StoreError as error:
            self._read_error = str(error)
            if not self._opened.is_set() and error.recovery in {"page_operator", "refuse"}:
                self._fatal = error
            log.warning("serving without the store: %s", error)
        else:
            self._store, self._read_error = store, ""
        self._progress = _Progress()

    def _probe(self) -> None:
        """Nothing to do: see whether a failed store is back."""
        if self._store is None:
            self._open()
        elif self._read_error or self._write_error:
            self._begin("looking whether it is back")
            try:
                self._store.reap()  # writes, and makes the directory again should it be gone
                self._store.refresh()
                self._read_error = ""
                self._write_error = self._write_error if self._is_full else ""
            except StoreError as error:
                self._read_error = str(error)
            self._progress = _Progress()

    def _restore(self, request: RestoreRequest) -> RestoreDone:
        """Read the longest prefix that is there and whole. Whatever fails, the rows can be computed."""
        started_at = self._begin("restoring a session")
        refused: list[str] = []
        done = RestoreDone(request=request)
        try:
            if self._store is not None:
                refused += self._look_again(self._store, request)
                done = self._restore_best(self._store, request, refused, started_at)
                self._read_error = ""
        except (RestoreAbandoned, OutOfKvMemory) as error:
            log.warning("a restore was given up: %s", error)
        except StoreError as error:
            log.warning("rows are recomputed: %s", error)
            if isinstance(error, StoreUnavailable):
                self._read_error = str(error)
        except Exception:  # a bug in reading a file must not cost the answer
            log.exception("a restore failed for an unforeseen reason; rows are recomputed")
        finally:
            self._progress = _Progress()
        return dataclasses.replace(done, refused=tuple(dict.fromkeys(refused)))

    def _look_again(self, store: SnapshotStore, request: RestoreRequest) -> list[str]:
        """Take in what other nodes published; returns what was refused of that, and what this request misses
        thereby."""
        report = store.refresh()
        self._tell()
        refused = store.refused()
        news = [f"{name}: {refused[name]}" for name in report.refused[:MAX_REFUSALS] if name in refused]
        return news + refused_prefixes(request.token_ids, refused)[-MAX_REFUSALS:]

    def _restore_best(
        self, store: SnapshotStore, request: RestoreRequest, refused: list[str], started_at: float
    ) -> RestoreDone:
        for _ in range(MAX_TRIES):
            match = store.find(request.token_ids, min_tokens=request.n_rows_at_least)
            if match is None or request.abandoned:
                break
            try:
                return self._read(store, match, request, started_at)
            except SnapshotRejected as error:
                log.warning("rows are recomputed: %s", error)
                refused.append(f"{match.name}: {error.reason}")
            except SnapshotGone:
                log.info("snapshot %s went away before it was read", match.name)
        return RestoreDone(request=request)

    def _read(self, store: SnapshotStore, match: Match, request: RestoreRequest, started_at: float) -> RestoreDone:
        n_rows = min(match.n_common, request.n_rows_at_most)
        sequence = self._new_sequence()
        try:
            store.restore(match, n_rows, _Staging(sequence, self._tell, request))
            sequence.commit(n_rows)
        except BaseException:
            sequence.release()
            raise
        geometry = store.geometry
        return RestoreDone(
            request=request,
            sequence=sequence,
            snapshot=match.name,
            n_bytes=n_rows * geometry.n_layers * geometry.kv_dim * 8,
            seconds=time.monotonic() - started_at,
        )

    def _publish(self, request: PublishRequest) -> PublishDone:
        started_at = self._begin("publishing a session")
        if self._store is None:
            self._progress = _Progress()
            return PublishDone(request=request, error=StoreDown(self._read_error))
        try:
            info = self._store.publish(request.token_ids, _Staging(request.sequence, self._tell))
        except StoreError as error:
            if isinstance(error, StoreUnavailable | StoreFull):  # else only this snapshot is not wanted
                self._write_error, self._is_full = str(error), isinstance(error, StoreFull)
            log.warning("session %s was not saved: %s", request.session_id, error)
            return PublishDone(request=request, error=error)
        except Exception as error:  # a bug in writing a file must not cost the session
            log.exception("session %s was not saved for an unforeseen reason", request.session_id)
            return PublishDone(request=request, error=error)
        else:
            self._write_error = ""
            published = Published(info.name, info.n_tokens, info.n_bytes, time.monotonic() - started_at)
            return PublishDone(request=request, published=published, already_there=info.already_there)
        finally:
            self._progress = _Progress()
