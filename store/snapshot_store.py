"""The snapshot store of one model on a shared directory: publish, find, restore, and keep within a budget."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import ArrayLike

from kvferry.store import vlkv
from kvferry.store.catalog import Catalog, Match, RefreshReport
from kvferry.store.directory import TRASH_GRACE_S, ReapReport, StoreDirectory
from kvferry.store.errors import SnapshotGone, SnapshotRejected, StoreFull, StoreMisuse
from kvferry.store.evictor import Evictor
from kvferry.store.fs import FileSystem, PosixFileSystem
from kvferry.store.geometry import KvGeometry, RowSink, RowSource, TokenIds
from kvferry.store.publish import Outcome, confirm_same, publish, write_snapshot
from kvferry.store.reader import RowBuffers, open_snapshot
from kvferry.store.space import Budget

__all__ = ["Match", "ReapReport", "RefreshReport", "SnapshotInfo", "SnapshotStore", "StoreStatistics"]

_log = logging.getLogger(__name__)

_COUNTED = (
    "n_published",
    "n_already_there",
    "n_failed_saves",
    "n_restored",
    "n_failed_restores",
    "bytes_written",
    "bytes_read",
)


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A published snapshot. ``already_there`` when a file with the same tokens had the name."""

    name: str
    n_tokens: int
    n_bytes: int
    already_there: bool


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store has done since it was made."""

    n_known: int
    n_refused: int
    n_published: int
    n_already_there: int
    n_failed_saves: int
    n_restored: int
    n_failed_restores: int
    n_evicted: int
    bytes_written: int
    bytes_read: int


class SnapshotStore:
    """Snapshots of one model (fingerprint) under ROOT/<fingerprint>, shared with other processes and hosts without
    locks.

    Threads: any thread may call ``find``, ``pin``, ``statistics``, ``refused``, which do no I/O. Everything else may
    wait for the disk (on NFS: for ever), so call it from an I/O thread; several may be at work at once, each publish
    and restore with buffers of its own (8 MiB). The constructor does no I/O either: a store that is down is met at
    the first call.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        geometry: KvGeometry,
        vocab_size: int,
        max_bytes: int,
        max_files: int,
        node_id: str,
        *,
        read_only: bool = False,
        trusted_uids: frozenset[int] | None = None,
        trash_grace_s: float = TRASH_GRACE_S,
        fs: FileSystem | None = None,
        unique: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        """``unique`` gives 32 hex digits that no other writer will use; ``trusted_uids`` whose files are read, None:
        anybody's who can write here.

        Raises StoreMisuse.
        """
        if max_bytes < 0 or max_files < 0:
            raise StoreMisuse("a store's budget cannot be negative", op="open store", path=root)
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.budget = Budget(max_bytes, max_files)
        self._read_only = read_only
        self._trusted_uids = trusted_uids
        self._trash_grace_s = trash_grace_s
        self._fs: FileSystem = PosixFileSystem() if fs is None else fs
        self._directory = StoreDirectory(self._fs, root, fingerprint, node_id, unique)
        self._catalog = Catalog(self._directory, geometry, vocab_size, trusted_uids)
        self._evictor = Evictor(self._directory, self._catalog, self.budget, trash_grace_s)
        self._lock = threading.Lock()  # guards the counts
        self._counts: Counter[str] = Counter()

    @classmethod
    def index_only(cls, root: Path, fingerprint: str, geometry: KvGeometry, vocab_size: int) -> SnapshotStore:
        """A store that only looks: for the coordinator's routing. It never writes, not even an mtime."""
        return cls(root, fingerprint, geometry, vocab_size, 0, 0, "index", read_only=True)

    def __repr__(self) -> str:
        return (
            f"SnapshotStore({self._directory.path}, {len(self._catalog)} known, {len(self._catalog.refused())} refused)"
        )

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    # --- at start, and from time to time

    def reap(self) -> ReapReport:
        """Makes the directory and takes away what crashes left in it. Once, at the node's start, before anything is
        published.

        Raises StoreUnavailable, StoreFull, StoreMisuse.
        """
        self._must_write("reap")
        report = self._directory.reap(self._trash_grace_s)
        if report != ReapReport():
            _log.info("reaped in %s: %s", self.path, report)
        return report

    def refresh(self) -> RefreshReport:
        """Takes in what other nodes published and forgets what is gone. Raises StoreUnavailable."""
        return self._catalog.refresh()

    def announce(self, name: str) -> bool:
        """Another node says it published this: opens it by its exact name. False when it is not to be seen yet, or
        known to be refused.

        Raises SnapshotRejected, StoreUnavailable.
        """
        return self._catalog.announce(name)

    def distrust(self, name: str, reason: str) -> None:
        """A node that read this file says it is to be refused: not offered again while it stays as it is.

        For a store that only looks, which never reads far enough to find out. Raises SnapshotRejected(bad_name),
        StoreUnavailable.
        """
        error = SnapshotRejected(reason, "a node that read it says so", path=self._directory.file(name))
        self._catalog.refuse(error, name, self._directory.identity(name))

    # --- reading

    def find(self, token_ids: ArrayLike, min_tokens: int = 16) -> Match | None:
        """The snapshot with the longest token-exact common prefix of at least min_tokens. The reference server asks
        for 16, too.

        No I/O. Of a request's n tokens at most n - 1 rows are of use: one token has to be computed for its logits.
        """
        return self._catalog.find(np.asarray(token_ids, np.int32), min_tokens)

    def restore(self, match: Match, n_rows: int, sink: RowSink) -> None:
        """Reads the first n_rows (at most match.n_common) of every layer into the sink. They must not count before
        this returns.

        Every check is made again on the open file, ids compared token by token. A refused or vanished file is not
        offered by ``find`` again, so ask it for the next best; after any other StoreUnavailable compute the rows, for
        the same file would be found. Raises SnapshotRejected, SnapshotGone, StoreUnavailable, StoreMisuse.
        """
        if not 1 <= n_rows <= match.n_common:
            raise StoreMisuse(f"{n_rows} rows asked of {match.n_common} common ones", op="restore", path=match.name)
        try:
            with self.pin(match.name):
                try:
                    self._read(match, n_rows, sink)
                except SnapshotGone:  # ESTALE may only mean that our handle is old: ask for the name once more
                    self._read(match, n_rows, sink)
        except SnapshotGone:
            self._catalog.forget(match.name)
            self._count(n_failed_restores=1)
            raise
        except Exception:
            self._count(n_failed_restores=1)
            raise
        self._count(n_restored=1, bytes_read=n_rows * vlkv.token_bytes(self.geometry))
        if not self._read_only:
            self._directory.touch(match.name)

    def _read(self, match: Match, n_rows: int, sink: RowSink) -> None:
        identity = None
        try:
            with open_snapshot(
                self._fs, self._directory.file(match.name), self.geometry, self._trusted_uids
            ) as snapshot:
                identity = snapshot.identity
                snapshot.check(self.vocab_size, match.name)
                snapshot.check_prefix(match.token_ids[:n_rows])
                snapshot.restore(n_rows, sink, RowBuffers(self.geometry))
        except SnapshotRejected as error:
            self._catalog.refuse(error, match.name, identity or self._directory.identity(match.name))
            raise

    def pin(self, name: str) -> AbstractContextManager[None]:
        """Keeps a snapshot from being evicted by this process, for a read or for a turn that waits to read it.

        Raises SnapshotGone when it is being evicted at this moment.
        """
        return self._evictor.pin(name)

    # --- writing

    def publish(self, token_ids: ArrayLike, rows: RowSource) -> SnapshotInfo:
        """Saves the rows of these tokens, int32 [n]. When it returns the snapshot is durable and visible to all.

        The rows must not change meanwhile. Memory: 8 MiB whatever the size. Evicts what the budget and the disk call
        for, first. Raises StoreFull, NameTaken, StoreUnavailable, StoreMisuse; nothing of a failed save stays under
        the snapshot's name.
        """
        self._must_write("publish")
        ids = self._checked(token_ids)
        try:
            info = self._save(ids, rows)
        except Exception:
            self._count(n_failed_saves=1)
            raise
        self._catalog.add(info.name, ids)
        if info.already_there:
            self._directory.touch(info.name)
            self._count(n_already_there=1)
        else:
            self._count(n_published=1, bytes_written=info.n_bytes)
        return info

    def _save(self, ids: TokenIds, rows: RowSource) -> SnapshotInfo:
        token_hash = vlkv.fnv1a(ids)
        name = vlkv.file_name(token_hash)
        n_bytes = vlkv.file_bytes(self.geometry, len(ids))
        if self._is_there(name, ids):
            return SnapshotInfo(name, len(ids), n_bytes, already_there=True)
        if n_bytes > self.budget.max_bytes or self.budget.max_files < 1:
            raise StoreFull(
                f"a snapshot of {len(ids)} tokens has {n_bytes} bytes,"
                f" the store's whole budget is {self.budget.max_bytes}",
                op="publish",
                path=self._directory.file(name),
            )
        try:
            outcome = self._write(name, n_bytes, token_hash, ids, rows)
        except StoreFull as error:
            if not isinstance(error.__cause__, OSError):
                raise  # the budget, not the disk
            self._free(n_bytes)
            outcome = self._write(name, n_bytes, token_hash, ids, rows)
        return SnapshotInfo(name, len(ids), n_bytes, already_there=outcome == "already_there")

    def _write(self, name: str, n_bytes: int, token_hash: int, ids: TokenIds, rows: RowSource) -> Outcome:
        """Reserve, make room, write, publish. The reservation is visible before anybody counts, so two writers see
        each other."""
        final = self._directory.file(name)
        with self._directory.temp(name, n_bytes) as temp:
            now_ns = temp.created_at_ns()
            self._evictor.make_room(now_ns, max(0, n_bytes - self._directory.free_bytes()), final)
            inode = write_snapshot(temp, self.geometry, ids, token_hash, rows, RowBuffers(self.geometry))
            return publish(self._fs, temp.path, final, inode, self.geometry, ids)

    def _is_there(self, name: str, ids: TokenIds) -> bool:
        if self._directory.identity(name) is None:
            return False
        try:
            confirm_same(self._fs, self._directory.file(name), self.geometry, ids)
        except SnapshotGone:
            return False
        return True

    # --- space

    def evict(self) -> tuple[str, ...]:
        """Brings the directory back within its budget and purges expired trash; returns the names that went.

        Raises StoreFull when pinned files alone exceed the budget, StoreUnavailable.
        """
        self._must_write("evict")
        if not self._directory.exists():
            return ()
        return self._evictor.make_room(self._directory.now_ns(), 0, self.path)

    def _free(self, n_bytes: int) -> None:
        """The disk said it is full (or a quota did, which no count of free bytes shows): get rid of as much as is to
        be written."""
        shortage = n_bytes - self._directory.free_bytes()
        self._evictor.make_room(self._directory_now_ns(), shortage if shortage > 0 else n_bytes, self.path)

    def _directory_now_ns(self) -> int:
        try:
            return self._directory.now_ns()
        except StoreFull:  # not even an empty file can be made; then every reservation counts
            return 0

    # --- reporting

    def refused(self) -> dict[str, str]:
        """Name and reason of files that were refused; they are left where they are."""
        return self._catalog.refused()

    def statistics(self) -> StoreStatistics:
        """Counts since the start."""
        with self._lock:
            counts = dict(self._counts)
        return StoreStatistics(
            n_known=len(self._catalog),
            n_refused=len(self._catalog.refused()),
            n_evicted=self._evictor.n_evicted,
            **{name: counts.get(name, 0) for name in _COUNTED},
        )

    def _count(self, **increments: int) -> None:
        with self._lock:
            self._counts.update(increments)

    def _must_write(self, op: str) -> None:
        if self._read_only:
            raise StoreMisuse(f"a read-only store does not {op}", op=op, path=self.path)

    def _checked(self, token_ids: ArrayLike) -> TokenIds:
        """The ids as a frozen copy. Raises StoreMisuse: a snapshot that every reader would refuse is not written."""
        ids = np.array(token_ids, np.int32)
        if ids.ndim != 1 or not 1 <= len(ids) <= vlkv.MAX_TOKENS:
            raise StoreMisuse(
                f"a snapshot has 1 to {vlkv.MAX_TOKENS} tokens in one row, not shape {ids.shape}", op="publish"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise StoreMisuse(f"a token id is outside the vocabulary of {self.vocab_size}", op="publish")
        ids.setflags(write=False)
        return ids
