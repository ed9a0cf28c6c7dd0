"""Version 3 inside a SnapshotStore: publishing the new rows only, restoring chains, quarantine, compaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvferry.store import names
from kvferry.store.catalog import Catalog
from kvferry.store.chain_reader import ChainReader, open_chain
from kvferry.store.chains import Segment
from kvferry.store.compaction import CheckedChain, plan_compaction
from kvferry.store.directory import StoreDirectory
from kvferry.store.errors import NameTaken, SnapshotGone, SnapshotRejected, StoreError, StoreFull, WriteBudgetSpent
from kvferry.store.evictor import Evictor
from kvferry.store.geometry import KvGeometry, TokenIds
from kvferry.store.payload import Kind, PlaneSource, TileMemory, as_sink, as_source, as_tiles
from kvferry.store.publish import Outcome, publish
from kvferry.store.segment_file import Terms, open_segment
from kvferry.store.segment_writer import SegmentWriter, layout_for
from kvferry.store.vlkv3 import (
    HINT_BYTES,
    NO_PARENT,
    ContentSpan,
    Extent,
    hint_of,
    prefix_digest,
    segment_name,
)
from kvferry.store.write_budget import WriteBudget

_log = logging.getLogger(__name__)

# Each round another node evicted a part of the chain between our look and our save.
_MAX_ROUNDS: Final = 4
# A chain of this many segments is read with as many open files, and every layer costs a call for each.
MAX_CHAIN: Final = 64

# Damage and forgery: the file goes to quarantine. Other refusals say that it is not ours, so it stays where it is.
_DAMAGE: Final = frozenset(
    {"truncated_header", "size_mismatch", "head_digest_mismatch", "block_digest_mismatch", "bad_scale"}
)
_NOT_OURS: Final = frozenset({"not_regular_file", "untrusted_owner"})


@dataclass(frozen=True, slots=True)
class Saved:
    """What a publish did: rows start..end-1 were written, n_bytes of file; or nothing, since that file has them."""

    name: str
    start: int
    end: int
    n_bytes: int
    outcome: Outcome


@dataclass(slots=True, kw_only=True)
class SegmentShelf:
    """The segments of one directory. Threads: as SnapshotStore, which owns it."""

    directory: StoreDirectory
    catalog: Catalog
    evictor: Evictor
    geometry: KvGeometry
    kind: Kind
    terms: Terms
    fingerprint: str
    unique: Callable[[], str]
    trusted_uids: frozenset[int] | None
    min_growth: int
    clock: Callable[[], float]
    write_budget: WriteBudget | None = None
    max_chain: int = MAX_CHAIN
    read_only: bool = False
    on_count: Callable[..., None] = field(default=lambda **_: None)

    # --- writing

    def publish(
        self, ids: TokenIds, rows: Any, spans: Sequence[ContentSpan], logits: NDArray[np.float32] | None
    ) -> Saved:
        """Saves the rows that no stored chain has. Raises as SnapshotStore.publish."""
        for _ in range(_MAX_ROUNDS):
            chain = self._longest_chain(ids, spans)
            start = chain[-1][1] if chain else 0
            if not self._all_there(chain):
                continue
            if start and len(ids) - start < self.min_growth:
                last = chain[-1][0]
                return Saved(last.name, last.start, start, last.n_bytes, "already_there")
            parent = self._digest(ids[:start], spans) if start else NO_PARENT
            extent = Extent(
                geometry=self.geometry,
                kind=self.kind,
                layout=layout_for(self.kind, as_tiles(rows)),
                start=start,
                n_tokens=len(ids) - start,
                fingerprint=self.fingerprint,
                parent=parent,
                prefix=self._digest(ids, spans),
                parent_hint=hint_of(chain[-1][0].name) if chain else bytes(HINT_BYTES),
            )
            new_spans = [span for span in spans if start <= span.start < len(ids)]
            source = as_source(self.kind, rows)
            return self._write(extent, ids[start:], new_spans, logits, source, as_tiles(rows), chain)
        raise StoreFull(
            "not saved: the chain before these rows is being evicted", op="publish", path=self.directory.path
        )

    def _write(
        self,
        extent: Extent,
        ids: TokenIds,
        spans: Sequence[ContentSpan],
        logits: NDArray[np.float32] | None,
        rows: PlaneSource,
        tiles: TileMemory | None,
        chain: Sequence[tuple[Segment, int]],
    ) -> Saved:
        salt = self.terms.seal.new_salt(self.unique())
        writer = SegmentWriter(extent, ids, spans, self.terms.seal, salt, logits)
        extent = writer.extent
        final = self.directory.file(extent.name)
        self._check_budgets(extent.file_bytes, final)
        with self.evictor.pin(*(segment.name for segment, _ in chain)):
            self._touch(chain[-1:])  # other nodes spare what is marked, and it the chain before it (evictor.py)
            outcome = self._attempt(writer, rows, tiles, final)
        segment = Segment(
            extent.name,
            extent.start,
            np.array(ids, np.int32),
            extent.parent,
            extent.prefix,
            chain[-1][0].name if chain else "",
            tuple(spans),
            extent.file_bytes,
        )
        self.catalog.add_segment(segment)
        return Saved(extent.name, extent.start, extent.end, extent.file_bytes, outcome)

    def write_budget_left(self) -> int | None:
        """Bytes that may still be written in this hour. Any thread."""
        return None if self.write_budget is None else max(0, self.write_budget.left(self.clock()))

    def _check_budgets(self, n_bytes: int, final: Path) -> None:
        if n_bytes > self.evictor.budget.max_bytes or self.evictor.budget.max_files < 1:
            raise StoreFull(
                f"a segment of {n_bytes} bytes is more than the store's whole budget of"
                f" {self.evictor.budget.max_bytes}",
                op="publish",
                path=final,
            )
        if self.write_budget is not None and n_bytes > self.write_budget.left(self.clock()):
            raise WriteBudgetSpent(
                f"not saved: {n_bytes} bytes are more than what is left of"
                f" {self.write_budget.bytes_per_hour} bytes per hour",
                op="publish",
                path=final,
            )

    def _attempt(self, writer: SegmentWriter, rows: PlaneSource, tiles: TileMemory | None, final: Path) -> Outcome:
        """Once, and once more after making room (the disk was full), or out of the way (a damaged file)."""
        try:
            return self._write_file(writer, rows, tiles, final)
        except StoreFull as error:
            if not isinstance(error.__cause__, OSError):
                raise  # the budget, not the disk
            self.evictor.free(writer.extent.file_bytes)
        except NameTaken as error:
            if not isinstance(error.__cause__, SnapshotRejected) or error.__cause__.reason in _NOT_OURS:
                raise
            # The name is made of what the file must hold, and of the key: nobody else saves anything under it.
            self.set_aside(final.name, error.__cause__, damaged=True)
        writer.rewind()
        return self._write_file(writer, rows, tiles, final)

    def _write_file(self, writer: SegmentWriter, rows: PlaneSource, tiles: TileMemory | None, final: Path) -> Outcome:
        n_bytes = writer.extent.file_bytes
        with self.directory.temp(final.name, n_bytes) as temp:
            shortage = max(0, n_bytes - self.directory.free_bytes())
            self.evictor.make_room(temp.created_at_ns(), shortage, final)
            try:
                inode = writer.write(temp, rows, tiles)
                return publish(self.directory.fs, temp.path, final, inode, lambda: self._confirm_same(writer, final))
            finally:
                if self.write_budget is not None:
                    self.write_budget.spend(self.clock(), temp.n_written)

    def _confirm_same(self, writer: SegmentWriter, final: Path) -> None:
        """Raises NameTaken, SnapshotGone, StoreUnavailable."""
        try:
            with open_segment(self.directory.fs, final, self.terms, self.trusted_uids) as there:
                same = there.extent.prefix == writer.extent.prefix and there.extent.start == writer.extent.start
        except SnapshotRejected as error:
            raise NameTaken(
                f"not saved: the name is taken by a file that is refused ({error.reason}): {final}", path=final
            ) from error
        if not same:
            raise NameTaken(f"not saved: {final} is another segment, and the older file stays", path=final)

    def _digest(self, ids: TokenIds, spans: Sequence[ContentSpan]) -> bytes:
        return prefix_digest(self.terms.seal, self.fingerprint, ids, spans)

    def _longest_chain(self, ids: TokenIds, spans: Sequence[ContentSpan] = ()) -> Sequence[tuple[Segment, int]]:
        match = self.catalog.find(ids, 1, spans)
        if match is None:
            return ()
        if names.is_segment(match.name):
            return self.catalog.chain(match.name, match.n_common)
        best: Sequence[tuple[Segment, int]] = ()  # a version 1 file hides the chains behind it
        for leaf in self.catalog.leaves():
            n_common = self.catalog.n_common(leaf, ids, spans)
            if n_common > (best[-1][1] if best else 0):
                best = self.catalog.chain(leaf, n_common)
        return best

    def _all_there(self, chain: Sequence[tuple[Segment, int]]) -> bool:
        """Whether the files still exist; those that do not are forgotten."""
        gone = [segment.name for segment, _ in chain if self.directory.identity(segment.name) is None]
        for name in gone:
            self.catalog.forget(name)
        return not gone

    # --- reading

    def restore(self, name: str, n_rows: int, sink: Any) -> int:
        """Hands the first n_rows to the sink; returns how many of them are good. Raises SnapshotGone,
        SnapshotRejected when not even one is, StoreUnavailable."""
        chain = list(self.catalog.chain(name, n_rows))
        error: StoreError = SnapshotGone("find", self.directory.file(name))
        tried_again = False
        while chain:
            try:
                with self.evictor.pin(*(segment.name for segment, _ in chain)):
                    self._touch(chain)  # before it is read: other nodes spare what is marked (evictor.py)
                    with self._open(chain) as reader:
                        n_good, damages = reader.restore(chain[-1][1], as_sink(self.kind, sink), as_tiles(sink))
            except SnapshotGone as gone:
                error = gone
                if not tried_again:  # ESTALE may only mean that our handle is old
                    tried_again = True
                    continue
                self.catalog.forget(Path(gone.path).name)
            except SnapshotRejected as refused:
                error = refused
                self.set_aside(Path(refused.path).name, refused)
            else:
                for damage in damages:
                    refusal = damage.rejection(self.directory.file(damage.name))
                    self.set_aside(damage.name, refusal)
                    error = refusal
                if n_good:
                    return n_good
                break
            chain = _before(chain, Path(error.path).name)
        raise error

    def _open(self, chain: Sequence[tuple[Segment, int]]) -> AbstractContextManager[ChainReader]:
        return open_chain(self.directory.fs, self.directory.path, chain, self.terms, self.trusted_uids)

    def _touch(self, chain: Sequence[tuple[Segment, int]]) -> None:
        if not self.read_only:
            for segment, _ in chain:
                self.directory.touch(segment.name)

    def logits(self, name: str) -> NDArray[np.float32] | None:
        """The logits of a segment's last position, if they were saved. Raises as ``restore``."""
        with open_segment(self.directory.fs, self.directory.file(name), self.terms, self.trusted_uids) as file:
            return file.logits()

    def set_aside(self, name: str, error: SnapshotRejected, *, damaged: bool = False) -> None:
        """The file is not offered again; a damaged one goes to quarantine, and is reported.

        Another one that has its name by now is met anew.
        """
        try:
            identity = self.directory.identity(name)
        except StoreError:
            identity = None
        if identity is not None and error.judged is not None and identity.is_of_another_file(error.judged):
            self.catalog.forget(name)
            return
        self.catalog.refuse(error, name, identity)
        if (damaged or error.reason in _DAMAGE) and not self.read_only:
            with suppress(StoreError):
                if self.directory.quarantine(name, error.judged) is not None:
                    self.on_count(n_quarantined=1)

    def refused_of(self, ids: TokenIds, refused: Mapping[str, str], spans: Sequence[ContentSpan] = ()) -> list[str]:
        """Names of the refused segments that would have continued a stored prefix of these tokens."""
        suspects = {name for name in refused if names.is_segment(name)}
        if not suspects:
            return []
        chain = self._longest_chain(ids, spans)
        starts = {0, *(segment.start for segment, _ in chain), *(stop for _, stop in chain)}
        digests = [self._digest(ids[:end], spans) for end in range(len(ids) + 1)]
        digests[0] = NO_PARENT
        return [
            name
            for start in sorted(starts)
            for end in range(start + 1, len(ids) + 1)
            if (name := segment_name(digests[start], digests[end], self.kind)) in suspects
        ]

    # --- compaction

    def compact(self, tell: Callable[[], None], most_chains: int | None) -> int:
        """Replaces chains of more than max_chain segments by longer segments; returns how many were replaced.

        ``tell`` is called whenever that has got on; it ends after ``most_chains`` chains.

        The new segment is durable and known before an old one goes, and whoever reads an old one can finish. What is
        found damaged is set aside, as a restore does, and its chain stays as it is.
        Raises StoreFull, WriteBudgetSpent, StoreUnavailable; nothing is lost then.
        """
        n_replaced = n_chains = 0
        for leaf in self.catalog.leaves():
            chain = self.catalog.chain(leaf, 1 << 62)
            run = plan_compaction([len(part.token_ids) for part, _ in chain], self.max_chain)
            if run is None:
                continue
            try:
                n_replaced += self._merge(chain[: run.stop], run.start, tell)
            except SnapshotRejected as refused:
                self.set_aside(Path(refused.path).name, refused)
                continue
            n_chains += 1
            if n_chains == most_chains:
                break
        return n_replaced

    def _merge(self, chain: Sequence[tuple[Segment, int]], first: int, tell: Callable[[], None]) -> int:
        run = [segment for segment, _ in chain[first:]]
        covered = [segment.name for segment, stop in chain[first:] if stop == segment.end]  # others hang on the rest
        start, end = run[0].start, chain[-1][1]
        pieces = [part.token_ids[: stop - part.start] for part, stop in chain]
        ids = np.concatenate(pieces)
        spans = [span for part, stop in chain for span in part.spans if span.start < stop]
        with self.evictor.pin(*(segment.name for segment, _ in chain)), self._open(chain) as reader:
            extent = replace(
                reader.parts[-1].file.extent,
                start=start,
                n_tokens=end - start,
                parent=run[0].parent,
                prefix=self._digest(ids, spans),
                parent_hint=hint_of(chain[first - 1][0].name) if first else bytes(HINT_BYTES),
                layout=reader.parts[0].file.extent.layout,
            )
            new_spans = [span for span in spans if span.start >= start]
            rows = CheckedChain(reader, tell)
            saved = self._write(extent, ids[start:], new_spans, reader.parts[-1].file.logits(), rows, None, chain)
        self.on_count(bytes_written=saved.n_bytes)
        return self.evictor.discard(covered)


def _before(chain: list[tuple[Segment, int]], name: str) -> list[tuple[Segment, int]]:
    """The chain up to the segment of this name, without it."""
    for index, (segment, _) in enumerate(chain):
        if segment.name == name:
            return chain[:index]
    return []
