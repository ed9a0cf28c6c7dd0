"""What the store holds, and where a session lies: values and their messages."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.proto.v1 import chat_pb2


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A snapshot's own file: the rows [start, end) are in it. `used_at_ms` is 0 while it is not known."""

    name: str
    start: int
    end: int
    n_bytes: int
    used_at_ms: int


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A run of tokens, [start, end), that n_snapshots begin with; `files` end with its last one."""

    id: str
    parent_id: str
    fingerprint: str
    namespace: str
    start: int
    end: int
    n_snapshots: int
    n_children: int
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True)
class StoredTree:
    """Prefixes, each after its parent, and what there is in all."""

    prefixes: tuple[StoredPrefix, ...]
    n_snapshots: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The longest prefix of a session that the store has for one fingerprint, and the files it lies in."""

    fingerprint: str
    n_tokens: int
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True)
class SessionPlaces:
    """Where the rows of a session's finished turns lie. `resident`: node and number of rows."""

    n_tokens: int
    resident: tuple[tuple[str, int], ...]
    stored: tuple[StoredRows, ...]


def tree_of(message: chat_pb2.ListSnapshotsResponse) -> StoredTree:
    """The store's contents."""
    return StoredTree(tuple(map(_prefix_of, message.prefixes)), message.n_snapshots, message.n_bytes)


def places_of(message: chat_pb2.LocateSessionResponse) -> SessionPlaces:
    """Where a session's rows lie."""
    return SessionPlaces(
        n_tokens=message.n_tokens,
        resident=tuple((rows.node_id, rows.n_tokens) for rows in message.resident),
        stored=tuple(StoredRows(s.fingerprint, s.n_tokens, tuple(map(_file_of, s.files))) for s in message.stored),
    )


def _prefix_of(message: chat_pb2.StoredPrefix) -> StoredPrefix:
    return StoredPrefix(
        id=message.id,
        parent_id=message.parent_id,
        fingerprint=message.fingerprint,
        namespace=message.namespace,
        start=message.start,
        end=message.end,
        n_snapshots=message.n_snapshots,
        n_children=message.n_children,
        files=tuple(map(_file_of, message.files)),
    )


def _file_of(message: chat_pb2.StoredFile) -> StoredFile:
    return StoredFile(message.name, message.start, message.end, message.n_bytes, message.used_at_ms)
