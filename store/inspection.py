"""Looking at one snapshot file for a person: every field, what it should be, and the verdict; never an exception for
a bad file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvferry.store import names, vlkv, vlkv3
from kvferry.store.errors import NameTaken, SnapshotRejected, os_errors_mapped
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry, Rows, TokenIds
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.q8 import Q8Rows
from kvferry.store.reader import open_regular, open_snapshot, read_exactly
from kvferry.store.seals import PlainSeal, Seal
from kvferry.store.segment_file import Terms, open_segment

_PLAIN: Final = PlainSeal()  # it has no state
WHOLE_FILES: Final = (vlkv.VERSION_F32, vlkv.VERSION_Q8)
"""Versions whose files hold a sequence from its first token on."""


@dataclass(frozen=True, slots=True)
class FieldView:
    """One header field: where, its bytes, what they say."""

    name: str
    offset: int
    raw: bytes
    value: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file is, as far as it can be said. ``refusal`` None: a reader takes it."""

    path: Path
    actual_bytes: int
    fields: tuple[FieldView, ...]
    header: vlkv.Header | None
    expected_bytes: int | None
    computed_hash: int | None
    refusal: SnapshotRejected | None
    extension: tuple[tuple[str, str], ...] = ()  # of version 3: name and value


def is_segment_file(fs: FileSystem, path: Path) -> bool:
    """Whether to judge a file as a segment: by its name, and by its head where the name is none that a store gives.

    A whole segment under another name is then refused for its name, not for its version. Raises
    SnapshotRejected(not_regular_file), SnapshotGone, StoreUnavailable.
    """
    if names.is_snapshot(path.name):
        return names.is_segment(path.name)
    with open_regular(fs, path) as (fd, identity):
        if identity.n_bytes < vlkv.HEADER_BYTES:
            return False
        head = bytearray(vlkv.HEADER_BYTES)
        read_exactly(fs, fd, [memoryview(head)], 0, path)
    header = vlkv.parse_header(bytes(head))
    return header.magic == vlkv.MAGIC and header.version == vlkv3.VERSION


def inspect_file(
    fs: FileSystem, path: Path, expected: KvGeometry | None, vocab_size: int | None, seal: Seal = _PLAIN
) -> Inspection:
    """Reads header and token ids. Raises SnapshotRejected(not_regular_file), SnapshotGone, StoreUnavailable."""
    refusal = judge(fs, path, expected, vocab_size, seal=seal)
    with open_regular(fs, path) as (fd, identity):
        head = bytearray(min(vlkv.HEADER_BYTES, identity.n_bytes))
        if head:
            read_exactly(fs, fd, [memoryview(head)], 0, path)
        if is_segment_file(fs, path):
            return _inspect_segment(fs, fd, path, identity.n_bytes, bytes(head), refusal)
        if len(head) < vlkv.HEADER_BYTES:
            return Inspection(path, identity.n_bytes, (), None, None, None, refusal)
        header = vlkv.parse_header(bytes(head))
        computed = None
        # what the header claims is believed only as far as the file reaches
        if 0 < header.file_n_tokens <= (identity.n_bytes - vlkv.HEADER_BYTES) // vlkv.ID_BYTES:
            ids = np.empty(header.file_n_tokens, "<i4")
            read_exactly(fs, fd, [ids.data.cast("B")], vlkv.ids_offset(), path)
            computed = vlkv.fnv1a(ids)
    fields = tuple(
        FieldView(name, offset, raw, _value(name, raw)) for name, offset, raw in vlkv.header_fields(bytes(head))
    )
    expected_bytes = (
        vlkv.file_bytes(header.geometry, header.file_n_tokens, header.version)
        if header.version in WHOLE_FILES
        else None
    )
    return Inspection(path, identity.n_bytes, fields, header, expected_bytes, computed, refusal)


def _inspect_segment(
    fs: FileSystem, fd: int, path: Path, n_bytes: int, head: bytes, refusal: SnapshotRejected | None
) -> Inspection:
    if len(head) < vlkv.HEADER_BYTES:
        return Inspection(path, n_bytes, (), None, None, None, refusal)
    fields = tuple(FieldView(name, offset, raw, _value(name, raw)) for name, offset, raw in vlkv3.header_fields(head))
    header = vlkv.parse_header(head)
    fixed = bytearray(min(vlkv3.FIXED_BYTES, n_bytes))
    read_exactly(fs, fd, [memoryview(fixed)], 0, path)
    try:
        extent = vlkv3.parse_extent(bytes(fixed), None)
    except SnapshotRejected:
        return Inspection(path, n_bytes, fields, header, None, None, refusal)
    computed = None
    if extent.file_bytes == n_bytes and extent.token_hash:
        ids = np.empty(extent.n_tokens, "<i4")
        read_exactly(fs, fd, [ids.data.cast("B")], vlkv3.FIXED_BYTES, path)
        computed = vlkv.fnv1a(ids)
    return Inspection(path, n_bytes, fields, header, extent.file_bytes, computed, refusal, extent.describe())


def judge(
    fs: FileSystem,
    path: Path,
    expected: KvGeometry | None,
    vocab_size: int | None,
    versions: Collection[int] = WHOLE_FILES,
    seal: Seal = _PLAIN,
) -> SnapshotRejected | None:
    """The refusal that a reader of these versions would answer with before it reads rows, None for a good file.

    Raises SnapshotGone, StoreUnavailable.
    """
    try:
        if is_segment_file(fs, path):
            with open_segment(fs, path, Terms(geometry=expected, vocab_size=vocab_size, seal=seal)):
                return None
        with open_snapshot(fs, path, expected, versions=versions) as snapshot:
            snapshot.check(vocab_size, path.name)
    except SnapshotRejected as error:
        return error
    return None


def confirm_good(fs: FileSystem, path: Path, seal: Seal) -> None:
    """A file that has a wanted name already is good, a segment to its last row.

    Raises NameTaken when it is not, SnapshotGone, StoreUnavailable.
    """
    refusal = judge(fs, path, None, None, seal=seal)
    if refusal is None and names.is_segment(path.name):
        with open_segment(fs, path, Terms(seal=seal)) as file:
            refusal = next((damage.rejection(path) for damage in file.damaged_blocks()), None)
    if refusal is not None:
        raise NameTaken(
            f"not written: {path} is there already and is refused ({refusal.reason}); move it away first", path=path
        )


def _value(name: str, raw: bytes) -> str:
    if name == "magic":
        return repr(raw)[1:]
    if name == "reserved":
        return "all zero" if not any(raw) else "not all zero"
    number = int.from_bytes(raw, "little")
    return f"{number:016x}" if name == "token_hash" else str(number)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole snapshot in memory: token_ids int32 [n], k and v float32 [layers, n, kv_dim]."""

    token_ids: TokenIds
    k: Rows
    v: Rows


@dataclass(frozen=True, slots=True)
class Q8Snapshot:
    """A whole version 2 snapshot in memory: token_ids int32 [n], and its rows."""

    token_ids: TokenIds
    rows: Q8Rows


def load_any(fs: FileSystem, path: Path, expected: KvGeometry | None, vocab_size: int | None) -> Snapshot | Q8Snapshot:
    """Reads a version 1 or 2 file whole, after every check. Raises as ``load_snapshot`` does."""
    with (
        os_errors_mapped("read", path),
        open_snapshot(fs, path, expected, versions=WHOLE_FILES) as snapshot,
    ):
        if snapshot.header.version == vlkv.VERSION_F32:
            return load_snapshot(fs, path, expected, vocab_size)
        snapshot.check(vocab_size, path.name)
        rows = Q8Rows.empty(snapshot.geometry, snapshot.n_tokens)
        snapshot.restore(snapshot.n_tokens, rows)
        return Q8Snapshot(snapshot.token_ids(), rows)


def load_snapshot(fs: FileSystem, path: Path, expected: KvGeometry | None, vocab_size: int | None) -> Snapshot:
    """Reads a snapshot whole, after every check. Raises SnapshotRejected, SnapshotGone, StoreUnavailable, StoreFull."""
    with os_errors_mapped("read", path), open_snapshot(fs, path, expected) as snapshot:
        snapshot.check(vocab_size, path.name)
        rows = MemoryRows.empty(snapshot.geometry, snapshot.n_tokens)
        snapshot.restore(snapshot.n_tokens, rows)
        return Snapshot(snapshot.token_ids(), rows.k, rows.v)
