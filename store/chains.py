"""Which segments continue which: pure, no files. Tokens of a chain are the concatenation of its segments' tokens.

A segment's parent is named by prefix digest, so any known chain that runs through the same tokens will do: the one
that ends there, one that a fork begins inside of, or the longer one that took its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.store.errors import SnapshotRejected
from kvferry.store.geometry import TokenIds
from kvferry.store.lcp_index import common_prefix
from kvferry.store.vlkv3 import NO_PARENT, ContentSpan, first_difference, identity_ids

PrefixDigest = Callable[[TokenIds, Sequence[ContentSpan]], bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What a head says. ``token_ids`` are the segment's own, int32 [end - start]."""

    name: str
    start: int
    token_ids: TokenIds
    parent: bytes
    prefix: bytes
    hint: str = ""  # the segment that held position start - 1 when this one was written
    spans: tuple[ContentSpan, ...] = ()
    n_bytes: int = 0

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class _Linked:
    """A segment whose tokens from position 0 on are known."""

    segment: Segment
    parent: str | None
    children: set[str] = field(default_factory=set)


class Chains:
    """All known segments; those without a known chain before them wait. Not thread-safe."""

    def __init__(self, digest: PrefixDigest) -> None:
        self._digest = digest
        self._linked: dict[str, _Linked] = {}
        self._waiting: dict[str, Segment] = {}
        self._by_prefix: dict[bytes, set[str]] = {}  # linked segments that end with this prefix

    def __contains__(self, name: object) -> bool:
        return name in self._linked or name in self._waiting

    def __iter__(self) -> Iterator[str]:
        yield from self._linked
        yield from self._waiting

    def __len__(self) -> int:
        return len(self._linked) + len(self._waiting)

    def orphans(self) -> tuple[str, ...]:
        """Segments without a known chain before them."""
        return tuple(self._waiting)

    def segment(self, name: str) -> Segment:
        """Raises KeyError."""
        return self._linked[name].segment if name in self._linked else self._waiting[name]

    def parent(self, name: str) -> str | None:
        """The segment that a linked one continues."""
        linked = self._linked.get(name)
        return None if linked is None else linked.parent

    def children(self, name: str) -> frozenset[str]:
        """The segments that continue this one."""
        linked = self._linked.get(name)
        return frozenset() if linked is None else frozenset(linked.children)

    def is_linked(self, name: str) -> bool:
        """Whether all before the segment is known."""
        return name in self._linked

    def chain(self, name: str, n_rows: int | None = None) -> tuple[tuple[Segment, int], ...]:
        """The segments from position 0 to this one, each with the position up to which its rows are used.

        With ``n_rows`` those that the first n_rows lie in. Raises KeyError for a segment that is not linked.
        """
        parts: list[tuple[Segment, int]] = []
        stop = self._linked[name].segment.end if n_rows is None else n_rows
        at: str | None = name
        while at is not None:
            segment = self._linked[at].segment
            if segment.start < stop:
                parts.append((segment, min(stop, segment.end)))
                stop = segment.start
            at = self._linked[at].parent
        return tuple(reversed(parts))

    def token_ids(self, name: str) -> TokenIds:
        """All tokens of the chain that ends with this segment, int32 [end]. Raises KeyError."""
        return np.concatenate([part.token_ids[: stop - part.start] for part, stop in self.chain(name)])

    def spans(self, name: str) -> tuple[ContentSpan, ...]:
        """All content spans of the chain. Raises KeyError."""
        return tuple(s for part, stop in self.chain(name) for s in part.spans if s.start < stop)

    def identity(self, name: str) -> TokenIds:
        """The chain's tokens with the content in them: what the index compares."""
        return identity_ids(self.token_ids(name), 0, self.spans(name))

    def along(self, token_ids: TokenIds, spans: Sequence[ContentSpan] = ()) -> list[Segment]:
        """The linked segments all of whose tokens, from position 0 to their own last, are these ones, content and all.

        int32 [n]. Compares each such segment, and each first one that is not, once.
        """
        reach: dict[str, int] = {}  # up to which position a segment's chain runs along
        level = [linked.segment for linked in self._linked.values() if linked.parent is None]
        for segment in level:
            n = common_prefix(segment.token_ids, token_ids[segment.start :])
            theirs = [span for span in spans if segment.start <= span.start < segment.end]
            reach[segment.name] = first_difference(segment.spans, theirs, segment.start + n)
            children = [self._linked[name].segment for name in sorted(self._linked[segment.name].children)]
            level += [child for child in children if child.start <= reach[segment.name]]
        return [segment for segment in level if reach[segment.name] == segment.end]

    def add(self, segment: Segment) -> tuple[list[str], list[tuple[str, SnapshotRejected]]]:
        """Takes a segment in; returns the names that are linked now because of it, and those to be refused."""
        if segment.name in self:
            return [], []
        self._waiting[segment.name] = segment
        linked: list[str] = []
        refused: list[tuple[str, SnapshotRejected]] = []
        fresh: list[Segment] = [segment]
        while fresh:
            candidate = fresh.pop()
            try:
                if not self._link(candidate):
                    continue
            except SnapshotRejected as error:
                del self._waiting[candidate.name]
                refused.append((candidate.name, error))
                continue
            linked.append(candidate.name)
            fresh += [w for w in self._waiting.values() if self._leads_to(candidate, w)]
        return linked, refused

    def _leads_to(self, linked: Segment, waiting: Segment) -> bool:
        """Whether a chain through ``linked`` goes on with ``waiting``; whatever was linked before, it has tried."""
        return (
            linked.start < waiting.start <= linked.end and self._digest_at(linked.name, waiting.start) == waiting.parent
        )

    def remove(self, name: str) -> list[str]:
        """Forgets a segment; returns the names that have no chain any more, descendants included."""
        self._waiting.pop(name, None)
        if name not in self._linked:
            return []
        below = self._subtree(name)
        for gone in below:
            self._unlist(self._linked.pop(gone.name))
        later = sorted(below[1:], key=lambda segment: (segment.start, segment.name))
        for segment in later:  # another chain may run through the same tokens
            self._waiting[segment.name] = segment
        for segment in later:
            self._link(segment)
        return [segment.name for segment in later if segment.name in self._waiting]

    def _subtree(self, name: str) -> list[Segment]:
        """The segment, then all that hang on it."""
        found = [self._linked[name].segment]
        for segment in found:
            found += [self._linked[child].segment for child in sorted(self._linked[segment.name].children)]
        return found

    def _unlist(self, linked: _Linked) -> None:
        names = self._by_prefix[linked.segment.prefix]
        names.discard(linked.segment.name)
        if not names:
            del self._by_prefix[linked.segment.prefix]
        if linked.parent is not None and linked.parent in self._linked:
            self._linked[linked.parent].children.discard(linked.segment.name)

    def _link(self, segment: Segment) -> bool:
        """Raises SnapshotRejected(prefix_digest_mismatch)."""
        parent = self._find_parent(segment)
        if parent is None and segment.parent != NO_PARENT:
            return False
        before: tuple[TokenIds, ...] = ()
        spans: tuple[ContentSpan, ...] = ()
        if parent is not None:
            before = (self.token_ids(parent)[: segment.start],)
            spans = tuple(span for span in self.spans(parent) if span.start < segment.start)
        if self._digest(np.concatenate((*before, segment.token_ids)), spans + segment.spans) != segment.prefix:
            raise SnapshotRejected(
                "prefix_digest_mismatch", f"the ids up to {segment.end} do not have the digest that it states"
            )
        self._linked[segment.name] = _Linked(segment, parent)
        self._waiting.pop(segment.name, None)
        self._by_prefix.setdefault(segment.prefix, set()).add(segment.name)
        if parent is not None:
            self._linked[parent].children.add(segment.name)
        return True

    def _find_parent(self, segment: Segment) -> str | None:
        """A linked segment that a chain to ``segment.start`` with the right digest runs through."""
        if segment.parent == NO_PARENT:
            return None
        ends_there = self._by_prefix.get(segment.parent, set()) - {segment.name}
        if ends_there:
            return min(ends_there)
        covering = [
            other.segment
            for other in self._linked.values()
            if other.segment.start < segment.start <= other.segment.end and other.segment.name != segment.name
        ]
        covering.sort(key=lambda other: (other.name != segment.hint, other.name))
        for other in covering:  # the hint first; then whatever runs over that position
            if self._digest_at(other.name, segment.start) == segment.parent:
                return other.name
        return None

    def _digest_at(self, name: str, position: int) -> bytes:
        return self._digest(self.token_ids(name)[:position], [s for s in self.spans(name) if s.start < position])
