"""What the store's index tells an operator: a tree of prefixes, and where a session lies in it. Never a token.

Any thread; what is asked is what the index in memory knows, so nobody waits for a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from kvferry.coordinator.errors import BadRequest
from kvferry.coordinator.registry import TokenArray
from kvferry.coordinator.snapshots import StoreIndex
from kvferry.proto.v1 import chat_pb2
from kvferry.store.lcp_index import Run
from kvferry.store.vlkv3 import ContentSpan

DEFAULT_PREFIXES: Final = 500
MAX_PREFIXES: Final = 2_000
"""The index is locked while it tells of them: 3 ms."""

SEPARATOR: Final = "/"  # in no fingerprint, no namespace and no file's name


@dataclass(frozen=True, slots=True)
class _Place:
    """What an id says."""

    id: str
    fingerprint: str
    namespace: str
    key: str
    end: int

    @classmethod
    def of(cls, prefix_id: str) -> Self:
        """Raises BadRequest."""
        try:
            fingerprint, namespace, key, end = prefix_id.split(SEPARATOR)
            return cls(prefix_id, fingerprint, namespace, key, int(end))
        except ValueError as e:
            raise BadRequest("below has to be the id of a prefix that ListSnapshots told") from e


def list_snapshots(
    indexes: Sequence[StoreIndex], asked: chat_pb2.ListSnapshotsRequest
) -> chat_pb2.ListSnapshotsResponse:
    """The tops of all trees, or what is below one prefix; a prefix that is gone has nothing below it.

    Raises BadRequest for an id that is none.
    """
    left = min(asked.max_prefixes or DEFAULT_PREFIXES, MAX_PREFIXES)
    below = _Place.of(asked.below) if asked.below else None
    prefixes: list[chat_pb2.StoredPrefix] = []
    for number, index in enumerate(indexes):
        share = -(-left // (len(indexes) - number)) if below is None else left
        with suppress(KeyError):
            found = _prefixes(index, share, below)
            prefixes += found
            left -= len(found)
    return chat_pb2.ListSnapshotsResponse(
        prefixes=prefixes,
        n_snapshots=sum(index.store.statistics().n_known for index in indexes),
        n_bytes=sum(file.n_bytes for index in indexes for file in list(index.files.values())),
    )


def stored_rows(
    indexes: Sequence[StoreIndex], namespace: str, token_ids: TokenArray, spans: Sequence[ContentSpan]
) -> list[chat_pb2.StoredRows]:
    """The files that hold a session's leading rows, for each fingerprint that has any."""
    found = []
    for index in indexes:
        match = index.store.find(token_ids, spans=spans) if index.namespace == namespace else None
        if match is not None:
            chain = [segment.name for segment, _ in index.store.catalog.chain(match.name, match.n_common)]
            files = [_file(index, name) for name in chain or [match.name]]
            found.append(chat_pb2.StoredRows(fingerprint=index.fingerprint, n_tokens=match.n_common, files=files))
    return found


def _prefixes(index: StoreIndex, limit: int, below: _Place | None) -> list[chat_pb2.StoredPrefix]:
    """Raises KeyError when the prefix is not of this index any more."""
    if below is not None and (below.fingerprint, below.namespace) != (index.fingerprint, index.namespace):
        return []
    runs = index.store.catalog.runs(limit, None if below is None else (below.key, below.end))
    return [_prefix(index, run, "" if below is None else below.id) for run in runs]


def _prefix(index: StoreIndex, run: Run, above: str) -> chat_pb2.StoredPrefix:
    """``above``: the id of what the first runs continue."""
    parent_id = _id(index, run.parent.key, run.parent.end) if run.parent else above
    return chat_pb2.StoredPrefix(
        id=_id(index, run.key, run.end),
        parent_id=parent_id,
        fingerprint=index.fingerprint,
        namespace=index.namespace,
        start=run.start,
        end=run.end,
        n_snapshots=run.n_below,
        n_children=run.n_children,
        files=[_file(index, name) for name in run.keys],
    )


def _file(index: StoreIndex, name: str) -> chat_pb2.StoredFile:
    try:
        start, end = index.store.catalog.extent(name)
    except KeyError:  # it went meanwhile
        start, end = 0, 0
    file = index.files.get(name)
    return chat_pb2.StoredFile(
        name=name,
        start=start,
        end=end,
        n_bytes=file.n_bytes if file else 0,
        used_at_ms=file.mtime_ns // 1_000_000 if file else 0,
    )


def _id(index: StoreIndex, key: str, end: int) -> str:
    return SEPARATOR.join((index.fingerprint, index.namespace, key, str(end)))
