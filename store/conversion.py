"""From one version to another. Exact rows stay what they are, bit for bit; only q4 loses something, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvferry.store import names, vlkv, vlkv3
from kvferry.store.chain_reader import open_chain
from kvferry.store.compaction import CheckedChain
from kvferry.store.errors import SnapshotRejected, StoreMisuse
from kvferry.store.folder import look
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry, Rows, TokenIds
from kvferry.store.inspection import WHOLE_FILES, Snapshot, confirm_good, is_segment_file, load_any
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.payload import Kind, Layout, MemoryPlanes, Planes, PlaneSource, fits, to_q4
from kvferry.store.publish import TempFile, create_temp, publish, write_q8_snapshot, write_snapshot
from kvferry.store.q8 import Q8Rows
from kvferry.store.reader import open_snapshot
from kvferry.store.seals import Seal
from kvferry.store.segment_file import Terms, open_segment
from kvferry.store.segment_writer import SegmentWriter

VERSION_OF: Final = {Kind.F32: 1, Kind.Q8: 2}


@dataclass(frozen=True, slots=True)
class Sequence:
    """A whole sequence, wherever it lies."""

    geometry: KvGeometry
    kind: Kind
    token_ids: TokenIds
    rows: PlaneSource
    fingerprint: str
    spans: tuple[vlkv3.ContentSpan, ...] = ()


@contextmanager
def open_sequence(fs: FileSystem, path: Path, terms: Terms) -> Iterator[Sequence]:
    """A version 1 or 2 file (read whole), or the chain that ends with a version 3 file (read as it is asked for).

    Raises SnapshotRejected, SnapshotGone, StoreUnavailable.
    """
    if not is_segment_file(fs, path):
        with open_snapshot(fs, path, terms.geometry, versions=WHOLE_FILES) as file:
            geometry = file.geometry
        loaded = load_any(fs, path, terms.geometry, terms.vocab_size)
        if isinstance(loaded, Snapshot):
            planes: Planes = (loaded.k, loaded.v)
        else:
            planes = (loaded.rows.k, loaded.rows.v, loaded.rows.k_scale, loaded.rows.v_scale)
        kind = Kind.F32 if isinstance(loaded, Snapshot) else Kind.Q8
        yield Sequence(geometry, kind, loaded.token_ids, MemoryPlanes(planes), "")
        return
    with open_segment(fs, path, terms):
        pass  # what is wrong with this file itself is said first
    folder = look(fs, path.parent, terms)
    if path.name in folder.refusals:
        raise folder.refusals[path.name]
    if not folder.chains.is_linked(path.name):
        raise SnapshotRejected("orphan_segment", "no stored chain ends where it begins", path=path)
    with ExitStack() as stack:
        reader = stack.enter_context(open_chain(fs, path.parent, folder.chains.chain(path.name), terms))
        extent = reader.parts[-1].file.extent
        yield Sequence(
            extent.geometry,
            extent.kind,
            folder.chains.token_ids(path.name),
            CheckedChain(reader),
            extent.fingerprint,
            folder.chains.spans(path.name),
        )


def convert(
    fs: FileSystem,
    source: Sequence,
    output: Path,
    unique: str,
    *,
    version: int,
    fingerprint: str,
    lossy: bool,
    terms: Terms,
) -> Path:
    """Writes a sequence as one file of a version into a folder; returns its path.

    Raises StoreMisuse for what the version cannot hold, StoreFull, NameTaken, StoreUnavailable, SnapshotRejected.
    """
    if version in {1, 2}:
        if VERSION_OF.get(source.kind) != version or source.spans:
            what = "pictures" if source.spans else f"{source.kind.name} rows"
            raise StoreMisuse(f"version {version} cannot hold {what}", op="convert", path=output)
        return _write_whole(fs, source, output, unique, terms.seal)
    if lossy:
        source = _to_q4(source)
    if not fingerprint and not source.fingerprint:
        raise StoreMisuse("a version 3 file names its model: give --fingerprint", op="convert", path=output)
    name = fingerprint or source.fingerprint
    extent = vlkv3.Extent(
        geometry=source.geometry,
        kind=source.kind,
        layout=Layout.ROWS,
        start=0,
        n_tokens=len(source.token_ids),
        fingerprint=names.check_fingerprint(name),
        parent=vlkv3.NO_PARENT,
        prefix=vlkv3.prefix_digest(terms.seal, name, source.token_ids, source.spans),
    )
    writer = SegmentWriter(extent, source.token_ids, source.spans, terms.seal, terms.seal.new_salt(unique))
    return _place(fs, output / extent.name, unique, terms.seal, lambda temp: writer.write(temp, source.rows))


def _write_whole(fs: FileSystem, source: Sequence, output: Path, unique: str, seal: Seal) -> Path:
    token_hash = vlkv.fnv1a(source.token_ids)
    arrays = MemoryPlanes.empty(source.kind, source.geometry, len(source.token_ids))
    for layer in range(source.geometry.n_layers):
        source.rows.read_planes(layer, 0, len(source.token_ids), tuple(a[layer] for a in arrays.arrays))

    def write(temp: TempFile) -> int:
        if source.kind is Kind.Q8:
            return write_q8_snapshot(temp, source.geometry, source.token_ids, token_hash, Q8Rows(*arrays.arrays))
        return write_snapshot(temp, source.geometry, source.token_ids, token_hash, MemoryRows(*arrays.arrays))

    return _place(fs, output / vlkv.file_name(token_hash), unique, seal, write)


def _place(fs: FileSystem, final: Path, unique: str, seal: Seal, write: Callable[[TempFile], int]) -> Path:
    path = final.parent / names.temp_name(final.name, "convert", unique, 0)
    with create_temp(fs, path) as temp:
        inode = write(temp)
        publish(fs, temp.path, final, inode, lambda: confirm_good(fs, final, seal))
    return final


class _Q4Rows:
    """float32 rows, made q4 as they are read."""

    def __init__(self, source: Sequence) -> None:
        self._source = source

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        shape = (stop - start, self._source.geometry.kv_dim)
        k, v = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._source.rows.read_planes(layer, start, stop, (k, v))
        (planes[0][:], planes[2][:]), (planes[1][:], planes[3][:]) = to_q4(k), to_q4(v)


def _to_q4(source: Sequence) -> Sequence:
    if source.kind is not Kind.F32 or not fits(Kind.Q4, Layout.ROWS, source.geometry):
        raise StoreMisuse("q4 is made of float32 rows whose width is a multiple of 32", op="convert")
    return replace(source, kind=Kind.Q4, rows=_Q4Rows(source))


def first_difference(left: Rows, right: Rows) -> int | None:
    """Index of the first row that is not the same, bit for bit."""
    differs = (left.view(np.uint8) != right.view(np.uint8)).reshape(len(left), -1).any(axis=1)
    return int(differs.argmax()) if differs.any() else None
