"""What a store directory is known to hold: which token sequences, and which files were refused. Memory only; files
are the truth.

The coordinator routes by a catalog of its own; a node's is part of its SnapshotStore.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.store import names
from kvferry.store.chains import Chains, Segment
from kvferry.store.directory import StoreDirectory
from kvferry.store.errors import SnapshotGone, SnapshotRejected, StoreUnavailable
from kvferry.store.geometry import KvGeometry, TokenIds
from kvferry.store.lcp_index import LcpIndex, Run, common_prefix
from kvferry.store.ownership import only_of
from kvferry.store.reader import Identity, open_snapshot
from kvferry.store.segment_file import SegmentFile, Terms, open_segment
from kvferry.store.space import Standing
from kvferry.store.vlkv3 import ContentSpan, first_difference, identity_ids, name_of_hint, prefix_digest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A snapshot that shares its first n_common tokens with a request; n_tokens is its own length.

    ``name`` is a version 1 file, or the last segment of a chain. ``token_ids`` are the common ones, int32 [n_common]: a
    restore compares them again with the file itself.
    """

    name: str
    n_common: int
    n_tokens: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """What a look at the directory found."""

    n_known: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


class Catalog:
    """Index of a directory's snapshots. Any thread may call any method; ``find`` does no I/O and never waits for one
    that does."""

    def __init__(
        self,
        directory: StoreDirectory,
        geometry: KvGeometry,
        vocab_size: int,
        trusted_uids: frozenset[int] | None,
        terms: Terms,
        versions: Collection[int],
        placeholder_ids: Collection[int] = (),
    ) -> None:
        self._directory = directory
        self._geometry = geometry
        self._vocab_size = vocab_size
        self._trusted_uids = trusted_uids
        self._terms = terms
        self._versions = versions  # of whole files
        self._placeholder_ids = list(placeholder_ids)
        self._lock = threading.Lock()  # guards the four below; never held during I/O
        self._index = LcpIndex()
        self._chains = Chains(lambda ids, spans: prefix_digest(terms.seal, terms.fingerprint or "", ids, spans))
        self._refused: dict[str, tuple[Identity | None, str]] = {}
        self._n_refusals = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._index)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._index or name in self._chains

    @property
    def n_refusals(self) -> int:
        """Files refused since the start, those that went away afterwards as well."""
        with self._lock:
            return self._n_refusals

    def refused(self) -> dict[str, str]:
        """Name and reason of the files that were refused and are still there."""
        with self._lock:
            return {name: reason for name, (_, reason) in self._refused.items()}

    def find(self, token_ids: TokenIds, min_tokens: int, spans: Sequence[ContentSpan] = ()) -> Match | None:
        """The snapshot with the longest token-exact common prefix, if that has min_tokens; among equals the shortest
        file."""
        ids = identity_ids(token_ids, 0, spans)
        with self._lock:
            found = self._index.find(ids)
            n_common = 0 if found is None else self._n_same_content(found.key, ids[: found.n_common], spans)
        if found is None or n_common < min_tokens:
            return None
        return Match(found.key, n_common, found.n_tokens, np.array(ids[:n_common], np.int32))

    def n_common(self, name: str, token_ids: TokenIds, spans: Sequence[ContentSpan]) -> int:
        """How many leading tokens a chain shares with these, content and all."""
        ids = identity_ids(token_ids, 0, spans)
        with self._lock:
            if not self._chains.is_linked(name):
                return 0
            return self._n_same_content(name, ids[: common_prefix(self._chains.identity(name), ids)], spans)

    def _n_same_content(self, name: str, ids: TokenIds, spans: Sequence[ContentSpan]) -> int:
        """Of ids that a snapshot has in common with a request, how many mean the same there."""
        if names.is_segment(name):
            return first_difference(self._chains.spans(name), spans, len(ids))
        unknown = np.flatnonzero(np.isin(ids, self._placeholder_ids))  # a whole file does not say what stands there
        return int(unknown[0]) if len(unknown) else len(ids)

    def chain(self, name: str, n_rows: int) -> tuple[tuple[Segment, int], ...]:
        """The segments that the first n_rows lie in, each with the position up to which; none when it is not known."""
        with self._lock:
            if not self._chains.is_linked(name):
                return ()
            return self._chains.chain(name, min(n_rows, self._chains.segment(name).end))

    def runs(self, limit: int, below: tuple[str, int] | None = None) -> list[Run]:
        """What is shared by how many, without a token: see LcpIndex.runs. Raises KeyError."""
        with self._lock:
            return self._index.runs(limit, below)

    def extent(self, name: str) -> tuple[int, int]:
        """The positions of the rows that are in a file, start and end. Raises KeyError."""
        with self._lock:
            if name in self._chains:
                segment = self._chains.segment(name)
                return segment.start, segment.end
            return 0, self._index.n_tokens(name)

    def standing(self) -> dict[str, Standing]:
        """Every segment's place, for evictions."""
        with self._lock:
            return {
                name: Standing(segment.start, segment.end, self._chains.parent(name))
                for name in self._chains
                for segment in (self._chains.segment(name),)
            }

    def orphans(self) -> tuple[str, ...]:
        """Segments that wait for a chain before them."""
        with self._lock:
            return self._chains.orphans()

    def leaves(self) -> tuple[str, ...]:
        """Segments that end a chain."""
        with self._lock:
            return tuple(
                name for name in self._chains if self._chains.is_linked(name) and not self._chains.children(name)
            )

    def children(self, name: str) -> frozenset[str]:
        """The segments that continue this one."""
        with self._lock:
            return self._chains.children(name)

    def only_of(self, token_ids: TokenIds, spans: Sequence[ContentSpan], n_shared: int) -> tuple[str, ...]:
        """What nothing else needs when the conversation of these tokens goes: see ownership.only_of."""
        with self._lock:
            whole = {name: self._index.token_ids(name) for name in self._index if not names.is_segment(name)}
            return only_of(self._chains, whole, token_ids, spans, n_shared)

    def add(self, name: str, token_ids: TokenIds) -> None:
        """Adds a snapshot whose ids are known without reading it."""
        with self._lock:
            self._index.add(name, token_ids)
            self._refused.pop(name, None)

    def add_segment(self, segment: Segment) -> None:
        """Takes a segment in, and the orphans that waited for it. Raises SnapshotRejected when its digest is wrong."""
        with self._lock:
            linked, refused = self._chains.add(segment)
            for name in linked:
                self._index.add(name, self._chains.identity(name))
            self._refused.pop(segment.name, None)
        for name, said in refused:
            error = said.at(self._directory.file(name))
            if name == segment.name:
                raise error
            self.refuse(error, name, self._directory.identity(name))

    def forget(self, name: str) -> None:
        """The snapshot is not there any more. What continued it waits for another chain."""
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._index.remove(name)
        for lost in self._chains.remove(name):
            self._index.remove(lost)

    def refuse(self, error: SnapshotRejected, name: str, identity: Identity | None) -> None:
        """The file is not offered again while it stays as it is."""
        with self._lock:
            self._drop(name)
            known = self._refused.get(name) == (identity, error.reason)
            self._refused[name] = (identity, error.reason)
            self._n_refusals += not known
        if not known:
            _log.warning("%s", error)

    def announce(self, name: str) -> bool:
        """Looks for a snapshot by its exact name and takes it in; says whether it is known now.

        Raises SnapshotRejected (also remembered) and StoreUnavailable.
        """
        if name in self:
            return True
        if self._is_known_refusal(name):
            return False
        identity = self._directory.identity(name)
        if identity is None:
            return False
        try:
            self._take_in(name)
        except SnapshotGone:
            return False
        except SnapshotRejected as error:
            self.refuse(error, name, identity)
            raise
        return True

    def refresh(self, taken: str = "") -> RefreshReport:
        """Lists the directory: takes in new names, forgets those that are gone, but for one that was ``taken`` away by
        the caller. Opens only what it has not seen.

        Raises StoreUnavailable when the directory cannot be listed; a single file that cannot be read is reported,
        not raised.
        """
        listed = self._directory.snapshot_names()
        with self._lock:
            known = set(self._index) | set(self._chains)
            self._refused = {name: refusal for name, refusal in self._refused.items() if name in listed}
        outcome: dict[str, list[str]] = {"added": [], "refused": [], "unreadable": []}
        for name in sorted(listed - known):
            outcome[self._meet(name)].append(name)
        removed = [name for name in sorted(known - listed - {taken}) if self._is_gone(name)]
        for name in removed:
            self.forget(name)
        return RefreshReport(
            len(self), tuple(outcome["added"]), tuple(removed), tuple(outcome["refused"]), tuple(outcome["unreadable"])
        )

    def _meet(self, name: str) -> str:
        """Takes in a listed file; says what became of it."""
        try:
            if self._is_known_refusal(name) or not self.announce(name):
                return "refused" if name in self.refused() else "unreadable"
        except SnapshotRejected:
            return "refused"
        except StoreUnavailable as error:
            _log.warning("%s", error)
            return "unreadable"
        return "added"

    def _take_in(self, name: str) -> None:
        if names.is_segment(name):
            with open_segment(self._directory.fs, self._directory.file(name), self._terms, self._trusted_uids) as file:
                segment = known_segment(file)
            self.add_segment(segment)
            return
        with open_snapshot(
            self._directory.fs, self._directory.file(name), self._geometry, self._trusted_uids, self._versions
        ) as snapshot:
            snapshot.check_quickly(self._vocab_size, name)
            self.add(name, snapshot.token_ids())

    def _is_gone(self, name: str) -> bool:
        """A listing may be older than an announcement, so a missing name is asked for exactly."""
        try:
            return self._directory.identity(name) is None
        except StoreUnavailable:
            return False

    def _is_known_refusal(self, name: str) -> bool:
        with self._lock:
            refusal = self._refused.get(name)
        return refusal is not None and refusal[0] == self._directory.identity(name)


def known_segment(file: SegmentFile) -> Segment:
    """What a chain has to know of an open segment."""
    extent = file.extent
    return Segment(
        extent.name,
        extent.start,
        file.token_ids,
        extent.parent,
        extent.prefix,
        name_of_hint(extent.parent_hint) if extent.start else "",
        file.spans,
        extent.file_bytes,
    )
