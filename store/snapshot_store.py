"""The snapshot store of one model on a shared directory: publish, find, restore, and keep within a budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.store import names, vlkv, vlkv3
from kvferry.store.catalog import Catalog, Match, RefreshReport
from kvferry.store.directory import TRASH_GRACE_S, ReapReport, StoreDirectory
from kvferry.store.errors import SnapshotRejected, StoreMisuse
from kvferry.store.evictor import Evictor
from kvferry.store.fs import FileSystem, PosixFileSystem
from kvferry.store.geometry import KvGeometry, RowSink, RowSource, TokenIds
from kvferry.store.identity import ensure_store_id
from kvferry.store.payload import Kind
from kvferry.store.payload import row_bytes as row_bytes_of
from kvferry.store.pins import Pins
from kvferry.store.reader import Identity
from kvferry.store.seals import PlainSeal, Seal, describe
from kvferry.store.segment_file import Terms
from kvferry.store.segments import SegmentShelf
from kvferry.store.snapshot_info import SnapshotInfo, checked_ids
from kvferry.store.space import Budget
from kvferry.store.statistics import StoreCounts, StoreStatistics
from kvferry.store.vlkv3 import ContentSpan
from kvferry.store.whole_files import WholeFiles
from kvferry.store.write_budget import WriteBudget

__all__ = ["Match", "ReapReport", "RefreshReport", "SnapshotInfo", "SnapshotStore", "StoreStatistics"]

_log = logging.getLogger(__name__)


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
        version: Literal[1, 3] = 1,
        kind: Kind | None = Kind.F32,
        seal: Seal | None = None,
        tenant: str = "",
        min_growth: int = 1,
        placeholder_ids: Collection[int] = (),
        write_budget: WriteBudget | None = None,
        pins: Pins | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``unique`` gives 32 hex digits that no other writer will use; ``trusted_uids`` whose files are read, None:
        anybody's who can write here.

        ``version`` is what is written; both are read. ``kind`` of the rows (None: any, to look only). A ``tenant`` has
        a directory and a key of its own. A continuation of less than ``min_growth`` tokens is not written. Whole files
        are not read beyond one of the ``placeholder_ids``, since they do not say what stood there. Stores that a
        process opens in one place share their ``pins``. Raises StoreMisuse.
        """
        if version == 1 and kind not in {Kind.F32, None}:
            raise StoreMisuse("version 1 holds float32 rows only", op="open store", path=root)
        if max_bytes < 0 or max_files < 0:
            raise StoreMisuse("a store's budget cannot be negative", op="open store", path=root)
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.budget = Budget(max_bytes, max_files)
        self._root = root
        self._unique = unique
        self._read_only = read_only
        self._trusted_uids = trusted_uids
        self._trash_grace_s = trash_grace_s
        self._fs: FileSystem = PosixFileSystem() if fs is None else fs
        folder = names.folder_of(fingerprint, tenant)
        self._seal = (PlainSeal() if seal is None else seal).for_tenant(names.tenant_digest(tenant))
        self._directory = StoreDirectory(self._fs, root, folder, node_id, unique)
        terms = Terms(geometry, kind, fingerprint, self._seal, vocab_size)
        versions = {Kind.F32: (1,), Kind.Q8: (2,), None: (1, 2)}.get(kind, ())
        self._catalog = Catalog(self._directory, geometry, vocab_size, trusted_uids, terms, versions, placeholder_ids)
        self._evictor = Evictor(self._directory, self._catalog, self.budget, trash_grace_s, pins or Pins())
        self.counts = StoreCounts()
        self._version = version
        self._segments = SegmentShelf(
            directory=self._directory,
            catalog=self._catalog,
            evictor=self._evictor,
            geometry=geometry,
            kind=Kind.F32 if kind is None else kind,
            terms=terms,
            fingerprint=fingerprint,
            unique=unique,
            trusted_uids=trusted_uids,
            min_growth=min_growth,
            clock=clock,
            write_budget=write_budget,
            read_only=read_only,
            on_count=self.counts.add,
        )
        self._files = WholeFiles(
            directory=self._directory,
            catalog=self._catalog,
            evictor=self._evictor,
            geometry=geometry,
            kind=self._segments.kind,
            vocab_size=vocab_size,
            trusted_uids=trusted_uids,
            read_only=read_only,
            pin=self.pin,
        )

    @classmethod
    def index_only(
        cls,
        root: Path,
        fingerprint: str,
        geometry: KvGeometry,
        vocab_size: int,
        *,
        fs: FileSystem | None = None,
        seal: Seal | None = None,
        tenant: str = "",
        removes: bool = False,
    ) -> SnapshotStore:
        """A store that only looks, and, if it ``removes``, deletes what it is told to: for the coordinator.

        It never writes, not even an mtime.
        """
        return cls(
            root, fingerprint, geometry, vocab_size, 0, 0, "index",
            read_only=not removes, kind=None, fs=fs, seal=seal, tenant=tenant,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"SnapshotStore({self._directory.path}, {len(self._catalog)} known, {len(self._catalog.refused())} refused)"
        )

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    @property
    def catalog(self) -> Catalog:
        """What is known of the directory; to look at."""
        return self._catalog

    @property
    def seal_name(self) -> str:
        """What tells the seal of its files from others, without giving a key away."""
        return describe(self._seal)

    @property
    def bytes_per_row(self) -> int:
        """Of one token's K and V in all layers, as they are stored."""
        return self.geometry.n_layers * row_bytes_of(self._segments.kind, self.geometry)

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

    def identify(self) -> str:
        """The id of the store that ROOT is, made when there is none (identity.py). Raises StoreUnavailable,
        StoreFull, StoreMisuse."""
        self._must_write("identify")
        return ensure_store_id(self._fs, self._root, self._unique)

    def refresh(self) -> RefreshReport:
        """Takes in what other nodes published and forgets what is gone. Raises StoreUnavailable."""
        return self._catalog.refresh()

    def free_bytes(self) -> int:
        """Bytes that the disk still takes. Raises StoreUnavailable."""
        return self._directory.free_bytes()

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

    def find(self, token_ids: ArrayLike, min_tokens: int = 16, spans: Sequence[ContentSpan] = ()) -> Match | None:
        """The snapshot with the longest token-exact common prefix of at least min_tokens. The reference server asks
        for 16, too.

        ``spans`` tell what stands behind placeholder tokens. No I/O. Of a request's n tokens at most n - 1 rows are of
        use: one token has to be computed for its logits.
        """
        return self._catalog.find(np.asarray(token_ids, np.int32), min_tokens, spans)

    def restore(self, match: Match, n_rows: int, sink: RowSink) -> None:
        """Reads the first n_rows (at most match.n_common) of every layer into the sink. They must not count before
        this returns.

        Every check is made again on the open file, ids compared token by token. A refused or vanished file is not
        offered by ``find`` again, so ask it for the next best; after any other StoreUnavailable compute the rows, for
        the same file would be found. Raises SnapshotRejected, SnapshotGone, StoreUnavailable, StoreMisuse.
        """
        n_good = self.restore_usable(match, n_rows, sink)
        if n_good < n_rows:
            raise SnapshotRejected(
                "block_digest_mismatch",
                f"of {n_rows} rows the first {n_good} are good; ask again for the next best",
                path=self._directory.file(match.name),
            )

    def restore_usable(self, match: Match, n_rows: int, sink: Any) -> int:
        """As ``restore``, but when a segment is damaged, the rows before the damage are delivered: returns how many.

        ``sink`` is a RowSink, for q8 rows a Q8Sink, or a PlaneSink; if it has ``tile_buffers``, blocks are read
        straight into its memory. Damaged files are in quarantine afterwards. Raises as ``restore``.
        """
        if not 1 <= n_rows <= match.n_common:
            raise StoreMisuse(f"{n_rows} rows asked of {match.n_common} common ones", op="restore", path=match.name)
        try:
            if names.is_segment(match.name):
                n_good = self._segments.restore(match.name, n_rows, sink)
            else:
                self._files.restore(match, n_rows, sink)
                n_good = n_rows
        except Exception:
            self.counts.add(n_failed_restores=1)
            raise
        self.counts.add(n_restored=1, bytes_read=n_good * (vlkv.ID_BYTES + self.bytes_per_row))
        return n_good

    def logits(self, match: Match) -> NDArray[np.float32] | None:
        """The logits of the last token, float32 [vocab], when the match ends with its segment and they were saved.

        Raises SnapshotRejected, SnapshotGone, StoreUnavailable.
        """
        if not names.is_segment(match.name) or match.n_common < match.n_tokens:
            return None
        return self._segments.logits(match.name)

    def pin(self, name: str) -> AbstractContextManager[None]:
        """Keeps a snapshot from being evicted by this process, for a read or for a turn that waits to read it.

        With a segment, its whole chain. Raises SnapshotGone when it is being evicted at this moment.
        """
        chain = self._catalog.chain(name, vlkv.MAX_TOKENS)
        return self._evictor.pin(*(segment.name for segment, _ in chain)) if chain else self._evictor.pin(name)

    def files(self) -> dict[str, Identity]:
        """Size and last use of each file that may be used. Raises StoreUnavailable."""
        usable = self._directory.snapshot_names() - self.refused().keys()
        found = {name: self._directory.identity(name) for name in usable}
        return {name: identity for name, identity in found.items() if identity is not None}

    def file(self, name: str) -> Identity | None:
        """The same of one; None when there is none. Raises SnapshotRejected(bad_name), StoreUnavailable."""
        return self._directory.identity(name)

    # --- writing

    def publish(
        self,
        token_ids: ArrayLike,
        rows: RowSource | Any,
        *,
        spans: Sequence[ContentSpan] = (),
        logits: NDArray[np.float32] | None = None,
    ) -> SnapshotInfo:
        """Saves the rows of these tokens, int32 [n]. When it returns the snapshot is durable and visible to all.

        Version 3 writes a segment of the rows that no stored chain has; ``rows`` may be a RowSource, a Q8Source, or a
        PlaneSource, and may offer ``tile_buffers``. The rows must not change meanwhile. Memory: 8 MiB whatever the
        size. Evicts what the budget and the disk call for, first. Raises StoreFull, NameTaken, StoreUnavailable,
        StoreMisuse; nothing of a failed save stays under the snapshot's name.
        """
        self._must_write("publish")
        ids = checked_ids(token_ids, self.vocab_size)
        try:
            info = self._save(ids, rows, spans, logits)
        except Exception as error:
            self.counts.add_failed_save(error)
            raise
        if info.already_there:
            self._directory.touch(info.name)
            self.counts.add(n_already_there=1)
        else:
            self.counts.add(n_published=1, bytes_written=info.n_bytes)
        return info

    def _save(
        self, ids: TokenIds, rows: Any, spans: Sequence[ContentSpan], logits: NDArray[np.float32] | None
    ) -> SnapshotInfo:
        if self._version == vlkv3.VERSION:
            saved = self._segments.publish(ids, rows, spans, logits)
            return SnapshotInfo(saved.name, saved.end, saved.n_bytes, saved.outcome == "already_there", saved.start)
        if any(span.start < len(ids) for span in spans):
            raise StoreMisuse("version 1 cannot say what a picture shows", op="publish", path=self.path)
        whole = self._files.publish(ids, rows)
        self._catalog.add(whole.name, ids)
        return SnapshotInfo(whole.name, len(ids), whole.n_bytes, whole.outcome == "already_there")

    def compact(self, tell: Callable[[], None] = lambda: None, most_chains: int | None = None) -> int:
        """Merges the segments of long chains; in idle time. Returns how many segments were replaced.

        ``tell`` is called whenever that has got on; it ends after ``most_chains`` chains.

        Raises StoreFull, StoreUnavailable, SnapshotRejected; nothing is lost then.
        """
        self._must_write("compact")
        return self._segments.compact(tell, most_chains)

    # --- space

    def evict(self) -> tuple[str, ...]:
        """Brings the directory back within its budget and purges expired trash; returns the names that went.

        Raises StoreFull when pinned files alone exceed the budget, StoreUnavailable.
        """
        self._must_write("evict")
        if not self._directory.exists():
            return ()
        return self._evictor.make_room(self._directory.now_ns(), 0, self.path)

    def remove(self, token_ids: ArrayLike, spans: Sequence[ContentSpan] = (), n_shared: int = 0) -> tuple[str, ...]:
        """Deletes what only the conversation of these tokens, int32 [n], needs; returns the names that went.

        ``n_shared``: the longest prefix that another living conversation has in common with it. What other stored
        segments continue stays, and so does what is pinned. Raises StoreUnavailable.
        """
        self._must_write("remove")
        self.refresh()
        going = self._catalog.only_of(np.asarray(token_ids, np.int32), spans, n_shared)
        return tuple(name for name in going if self._evictor.remove(name, partial(self._is_continued, name)))

    def _is_continued(self, name: str) -> bool:
        """By another node, perhaps, as of now; also when it was just taken away."""
        self._catalog.refresh(taken=name)
        return bool(self._catalog.children(name))

    # --- reporting

    def refused(self) -> dict[str, str]:
        """Name and reason of files that were refused; they are left where they are."""
        return self._catalog.refused()

    def refused_of(self, token_ids: ArrayLike, spans: Sequence[ContentSpan] = ()) -> dict[str, str]:
        """Name and reason of refused segments that hold rows of these tokens. 20 us a token when any is refused."""
        refused = self._catalog.refused()
        found = self._segments.refused_of(np.asarray(token_ids, np.int32), refused, spans)
        return {name: refused[name] for name in found}

    def statistics(self) -> StoreStatistics:
        """Counts since the start."""
        return StoreStatistics(
            n_known=len(self._catalog),
            n_refused=len(self._catalog.refused()),
            n_refusals=self._catalog.n_refusals,
            n_evicted=self._evictor.n_evicted,
            n_orphans=len(self._catalog.orphans()),
            write_budget_left=self._segments.write_budget_left(),
            **self.counts.so_far(),
        )

    def _must_write(self, op: str) -> None:
        if self._read_only:
            raise StoreMisuse(f"a read-only store does not {op}", op=op, path=self.path)
