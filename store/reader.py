"""Opening a snapshot by its exact name, judging it, and reading rows out of it straight into their destination's
layout.

The file's blocks interleave K and V rows. ``preadv`` scatters them while it reads: K rows land side by side in one
buffer and V rows in another, with no second copy and in calls of several MiB.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvferry.store import vlkv
from kvferry.store.errors import SnapshotRejected, from_os_error, os_errors_mapped
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry, Rows, TokenIds
from kvferry.store.lcp_index import common_prefix
from kvferry.store.payload import Kind, as_in_place_reader, as_sink
from kvferry.store.q8 import RECORDS_PER_CALL, Q8Records, check_scales
from kvferry.store.workers import work_off

# Below this a thread costs more than it saves.
PARALLEL_BYTES: Final = 4 << 20
# Linux takes at most 1,024 buffers in one call (UIO_MAXIOV): two per block, so at most 512 blocks; the rest is room
# for a tail.
MAX_BLOCKS_PER_CALL: Final = 480


@dataclass(frozen=True, slots=True)
class Identity:
    """Tells a file from another one that came to have its name."""

    inode: int
    n_bytes: int
    mtime_ns: int

    def is_of_another_file(self, other: Identity) -> bool:
        """A file keeps its inode when it is marked as used, and its time where a file system makes inodes up."""
        return self.inode != other.inode and self.mtime_ns != other.mtime_ns


def rows_per_call(geometry: KvGeometry, n_bytes: int) -> int:
    """Rows of whole float32 blocks in ``n_bytes``."""
    block_bytes = 2 * vlkv.VALUE_BYTES * geometry.kv_dim * geometry.block_size
    return max(1, min(n_bytes // block_bytes, MAX_BLOCKS_PER_CALL)) * geometry.block_size


class RowBuffers:
    """Two reused arrays for runs of K and V rows. One per thread: its content is overwritten by every run."""

    def __init__(self, geometry: KvGeometry, n_bytes: int) -> None:
        self.max_rows = rows_per_call(geometry, n_bytes)
        self.k: Rows = np.empty((self.max_rows, geometry.kv_dim), "<f4")
        self.v: Rows = np.empty((self.max_rows, geometry.kv_dim), "<f4")
        self._skipped = memoryview(bytearray(vlkv.VALUE_BYTES * geometry.kv_dim * geometry.block_size))
        self._row_bytes = vlkv.VALUE_BYTES * geometry.kv_dim
        self._block_size = geometry.block_size

    def pieces(self, segment: vlkv.Segment) -> list[memoryview]:
        """The buffers in the order in which the file holds the segment's rows: K of a block, V of the block, K of the
        next one.

        In a block that is read in part, a throw-away piece stands for the K rows that are not wanted.
        """
        k = self.k.data.cast("B")
        v = self.v.data.cast("B")
        n_rows = segment.stop - segment.start
        pieces = []
        for first in range(0, n_rows, self._block_size):
            last = min(first + self._block_size, n_rows)
            rows = slice(first * self._row_bytes, last * self._row_bytes)
            n_skipped = segment.n_in_block - (last - first)
            pieces.append(k[rows])
            if n_skipped:
                pieces.append(self._skipped[: n_skipped * self._row_bytes])
            pieces.append(v[rows])
        return pieces


class SnapshotFile:
    """An open snapshot whose header and size have been judged good. Made by open_snapshot; use from one thread."""

    def __init__(self, fs: FileSystem, fd: int, path: Path, header: vlkv.Header, identity: Identity) -> None:
        self._fs = fs
        self._fd = fd
        self.path = path
        self.header = header
        self.identity = identity
        self._token_ids: TokenIds | None = None

    @property
    def geometry(self) -> KvGeometry:
        """The file's geometry."""
        return self.header.geometry

    @property
    def n_tokens(self) -> int:
        """Rows saved."""
        return self.header.file_n_tokens

    def token_ids(self) -> TokenIds:
        """The file's token ids as they stand, int32 [n_tokens]; the size check has bounded n. Raises
        StoreUnavailable."""
        if self._token_ids is None:
            ids = np.empty(self.n_tokens, "<i4")
            read_exactly(self._fs, self._fd, [ids.data.cast("B")], vlkv.ids_offset(), self.path)
            self._token_ids = ids
        return self._token_ids

    def check(self, vocab_size: int | None, name: str | None) -> None:
        """Judges ids, hash and name in full. Raises SnapshotRejected."""
        try:
            vlkv.check_token_ids(self.header, self.token_ids(), vocab_size)
            if name is not None:
                vlkv.check_file_name(self.header, name)
        except SnapshotRejected as error:
            raise error.at(self.path) from None

    def check_quickly(self, vocab_size: int | None, name: str) -> None:
        """The same verdicts but for one: that the hash is the ids' is believed until rows are asked for (4 ms a file).

        Raises SnapshotRejected.
        """
        ids = self.token_ids()
        in_vocabulary = int(ids.min()) >= 0 and (vocab_size is None or int(ids.max()) < vocab_size)
        if not in_vocabulary or name != vlkv.file_name(self.header.token_hash):
            self.check(vocab_size, name)

    def check_prefix(self, wanted: TokenIds) -> None:
        """The file's first ids are the wanted ones, token by token. Raises SnapshotRejected(token_prefix_mismatch)."""
        n_common = common_prefix(self.token_ids(), wanted)
        if n_common < len(wanted):
            raise SnapshotRejected(
                "token_prefix_mismatch",
                f"its token ids leave the request's at position {n_common}, {len(wanted)} were to be restored",
                path=self.path,
            )

    def restore(self, n_rows: int, sink: Any, *, parallel: bool = False) -> None:
        """Hands the first n_rows of every layer to the sink (a PlaneSink, RowSink or Q8Sink), in file order.

        With ``parallel``, from two threads once the first call has come back. Raises StoreUnavailable, SnapshotGone,
        SnapshotRejected(size_mismatch) when the file shrinks meanwhile, and for version 2 SnapshotRejected(bad_scale);
        the sink may then hold a part.
        """
        q8 = self.header.version == vlkv.VERSION_Q8
        n_bytes = n_rows * (vlkv.file_bytes(self.geometry, self.n_tokens, self.header.version) // self.n_tokens)
        runs, new_worker = (self._q8_runs, self._q8_worker) if q8 else (self._f32_runs, self._f32_worker)
        work_off(runs(n_rows), lambda: new_worker(sink), parallel=parallel and n_bytes >= PARALLEL_BYTES)

    def _f32_runs(self, n_rows: int) -> Iterator[vlkv.Segment]:
        max_rows = rows_per_call(self.geometry, self._fs.read_bytes)
        for layer in range(self.header.n_layers):
            yield from vlkv.segments(self.geometry, self.n_tokens, n_rows, layer, max_rows)

    def _f32_worker(self, sink: Any) -> Callable[[vlkv.Segment], None]:
        buffers, taker = RowBuffers(self.geometry, self._fs.read_bytes), as_sink(Kind.F32, sink)
        in_place = as_in_place_reader(sink) if self._fs.has_descriptors else None
        size = self.geometry.block_size

        def restore(run: vlkv.Segment) -> None:
            whole = (run.stop - run.start) % size == 0
            if (
                in_place is not None
                and whole
                and in_place.read_rows_in_place(self._fd, run.offset, run.layer, run.start, run.stop - run.start, size)
            ):
                return
            read_exactly(self._fs, self._fd, buffers.pieces(run), run.offset, self.path)
            n = run.stop - run.start
            taker.write_planes(run.layer, run.start, (buffers.k[:n], buffers.v[:n]))

        return restore

    def _q8_runs(self, n_rows: int) -> Iterator[vlkv.Segment]:
        """Record runs; a partial read skips the rest of a layer by whole records, scales included."""
        for layer in range(self.header.n_layers):
            for start in range(0, n_rows, RECORDS_PER_CALL):
                offset = vlkv.q8_record_offset(self.geometry, self.n_tokens, layer, start)
                yield vlkv.Segment(layer, start, min(n_rows, start + RECORDS_PER_CALL), offset, 1)

    def _q8_worker(self, sink: Any) -> Callable[[vlkv.Segment], None]:
        taker = as_sink(Kind.Q8, sink)
        records = Q8Records(self.geometry, min(self.n_tokens, RECORDS_PER_CALL))

        def restore(run: vlkv.Segment) -> None:
            n = run.stop - run.start
            read_exactly(self._fs, self._fd, [records.bytes(n)], run.offset, self.path)
            columns = records.columns(n)
            try:
                check_scales(*columns[2:])
            except SnapshotRejected as error:
                raise error.at(self.path) from None
            taker.write_planes(run.layer, run.start, tuple(np.ascontiguousarray(column) for column in columns))

        return restore


def read_exactly(fs: FileSystem, fd: int, pieces: Sequence[memoryview], offset: int, path: Path) -> None:
    """Fills all pieces from ``offset`` on, going on after short reads. Raises SnapshotRejected(size_mismatch) at an
    early end."""
    left = list(pieces)
    while left:
        with os_errors_mapped("read", path):
            n_read = fs.preadv(fd, left, offset)
        if n_read == 0:
            raise SnapshotRejected("size_mismatch", "it ends before its own header says", path=path)
        offset += n_read
        left = after(left, n_read)


def after(pieces: list[memoryview], n_done: int) -> list[memoryview]:
    """What is left of the pieces when their first n_done bytes are dealt with."""
    for index, piece in enumerate(pieces):
        if n_done < len(piece):
            return [piece[n_done:], *pieces[index + 1 :]]
        n_done -= len(piece)
    return []


@contextmanager
def open_regular(
    fs: FileSystem, path: Path, trusted_uids: frozenset[int] | None = None
) -> Iterator[tuple[int, Identity]]:
    """Opens a regular file for reading, never through a symbolic link, never waiting for a FIFO.

    Raises SnapshotRejected(not_regular_file or untrusted_owner), SnapshotGone, StoreUnavailable.
    """
    try:
        fd = fs.open_read(str(path))
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EMLINK, errno.ENXIO}:  # a symbolic link, or a socket
            raise SnapshotRejected("not_regular_file", "it is a symbolic link or a socket", path=path) from None
        raise from_os_error(error, "open", path) from error
    try:
        with os_errors_mapped("look at", path):
            status = fs.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotRejected("not_regular_file", "it is not a regular file", path=path)
        if trusted_uids is not None and status.st_uid not in trusted_uids:
            raise SnapshotRejected("untrusted_owner", f"it belongs to user {status.st_uid}", path=path)
        identity = Identity(status.st_ino, status.st_size, status.st_mtime_ns)
        try:
            yield fd, identity
        except SnapshotRejected as error:
            if error.path == str(path):
                error.judged = identity
            raise
    finally:
        with suppress(OSError):  # nothing was written, so nothing can be lost
            fs.close(fd)


@contextmanager
def open_snapshot(
    fs: FileSystem,
    path: Path,
    expected: KvGeometry | None,
    trusted_uids: frozenset[int] | None = None,
    versions: Collection[int] = (vlkv.VERSION_F32,),
) -> Iterator[SnapshotFile]:
    """Opens a snapshot and judges its header and size; with ``expected`` also against a model's geometry.

    Raises SnapshotRejected, SnapshotGone, StoreUnavailable.
    """
    with open_regular(fs, path, trusted_uids) as (fd, identity):
        head = bytearray(min(vlkv.HEADER_BYTES, identity.n_bytes))
        if head:
            read_exactly(fs, fd, [memoryview(head)], 0, path)
        try:
            header = vlkv.parse_header(memoryview(head))
            vlkv.check_header(header, identity.n_bytes, expected, versions)
        except SnapshotRejected as error:
            raise error.at(path) from None
        yield SnapshotFile(fs, fd, path, header, identity)
