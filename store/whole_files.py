"""Version 1 (and, to read, 2) inside a SnapshotStore: one file holds a sequence from its first token on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.store import vlkv
from kvferry.store.catalog import Catalog, Match
from kvferry.store.directory import StoreDirectory
from kvferry.store.errors import SnapshotGone, SnapshotRejected, StoreFull
from kvferry.store.evictor import Evictor
from kvferry.store.geometry import KvGeometry, RowSource, TokenIds
from kvferry.store.payload import Kind, as_tiles
from kvferry.store.publish import Outcome, confirm_same, publish, write_snapshot
from kvferry.store.reader import open_snapshot


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A published file."""

    name: str
    n_bytes: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFiles:
    """The whole files of one directory. Threads: as SnapshotStore, which owns it."""

    directory: StoreDirectory
    catalog: Catalog
    evictor: Evictor
    geometry: KvGeometry
    kind: Kind
    vocab_size: int
    trusted_uids: frozenset[int] | None
    read_only: bool
    pin: Callable[[str], Any]

    def restore(self, match: Match, n_rows: int, sink: Any) -> None:
        """Raises SnapshotRejected, SnapshotGone, StoreUnavailable."""
        try:
            with self.pin(match.name):
                if not self.read_only:
                    self.directory.touch(match.name)  # before it is read: other nodes spare what is marked
                try:
                    self._read(match, n_rows, sink)
                except SnapshotGone:  # ESTALE may only mean that our handle is old: ask for the name once more
                    self._read(match, n_rows, sink)
        except SnapshotGone:
            self.catalog.forget(match.name)
            raise

    def _read(self, match: Match, n_rows: int, sink: Any) -> None:
        identity = None
        version = 2 if self.kind is Kind.Q8 else 1
        try:
            with open_snapshot(
                self.directory.fs, self.directory.file(match.name), self.geometry, self.trusted_uids, (version,)
            ) as snapshot:
                identity = snapshot.identity
                snapshot.check(self.vocab_size, match.name)
                snapshot.check_prefix(match.token_ids[:n_rows])
                snapshot.restore(n_rows, sink, parallel=as_tiles(sink) is not None)
        except SnapshotRejected as error:
            self.catalog.refuse(error, match.name, identity or self.directory.identity(match.name))
            raise

    def publish(self, ids: TokenIds, rows: RowSource) -> WholeFile:
        """Raises as SnapshotStore.publish."""
        token_hash = vlkv.fnv1a(ids)
        name = vlkv.file_name(token_hash)
        n_bytes = vlkv.file_bytes(self.geometry, len(ids))
        if self._is_there(name, ids):
            return WholeFile(name, n_bytes, "already_there")
        if n_bytes > self.evictor.budget.max_bytes or self.evictor.budget.max_files < 1:
            raise StoreFull(
                f"a snapshot of {len(ids)} tokens has {n_bytes} bytes,"
                f" the store's whole budget is {self.evictor.budget.max_bytes}",
                op="publish",
                path=self.directory.file(name),
            )
        try:
            outcome = self._write(name, n_bytes, token_hash, ids, rows)
        except StoreFull as error:
            if not isinstance(error.__cause__, OSError):
                raise  # the budget, not the disk
            self.evictor.free(n_bytes)
            outcome = self._write(name, n_bytes, token_hash, ids, rows)
        return WholeFile(name, n_bytes, outcome)

    def _write(self, name: str, n_bytes: int, token_hash: int, ids: TokenIds, rows: RowSource) -> Outcome:
        """Reserve, make room, write, publish. The reservation is visible before anybody counts, so two writers see
        each other."""
        final = self.directory.file(name)
        with self.directory.temp(name, n_bytes) as temp:
            now_ns = temp.created_at_ns()
            self.evictor.make_room(now_ns, max(0, n_bytes - self.directory.free_bytes()), final)
            inode = write_snapshot(temp, self.geometry, ids, token_hash, rows)
            confirm = partial(confirm_same, self.directory.fs, final, self.geometry, ids)
            return publish(self.directory.fs, temp.path, final, inode, confirm)

    def _is_there(self, name: str, ids: TokenIds) -> bool:
        if self.directory.identity(name) is None:
            return False
        try:
            confirm_same(self.directory.fs, self.directory.file(name), self.geometry, ids)
        except SnapshotGone:
            return False
        return True
