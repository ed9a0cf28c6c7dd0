"""Opening a snapshot by its exact name, judging it, and reading rows out of it straight into their destination's
layout.

The file's blocks interleave K and V rows. ``preadv`` scatters them while it reads: K rows land side by side in one
buffer and V rows in another, with no second copy and in calls of several MiB.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvferry.store import vlkv
from kvferry.store.errors import SnapshotRejected, from_os_error, os_errors_mapped
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry, Rows, RowSink, TokenIds
from kvferry.store.lcp_index import common_prefix
from kvferry.store.q8 import RECORDS_PER_CALL, Q8Records, Q8Sink, check_scales

# K and V rows held in memory while a snapshot is read or written. Large enough that a call's overhead vanishes (at 1
# GB/s it is 8 ms of work), small enough for a board with 2 GiB.
BUFFER_BYTES: Final = 8 << 20
# Linux takes at most 1,024 buffers in one call (UIO_MAXIOV): two per block, so at most 512 blocks; the rest is room
# for a tail.
MAX_BLOCKS_PER_CALL: Final = 480


@dataclass(frozen=True, slots=True)
class Identity:
    """Tells a file from another one that came to have its name."""

    inode: int
    n_bytes: int
    mtime_ns: int


class RowBuffers:
    """Two reused arrays for runs of K and V rows. One per thread: its content is overwritten by every run."""

    def __init__(self, geometry: KvGeometry, n_bytes: int = BUFFER_BYTES) -> None:
        block_bytes = 2 * vlkv.VALUE_BYTES * geometry.kv_dim * geometry.block_size
        n_blocks = max(1, min(n_bytes // block_bytes, MAX_BLOCKS_PER_CALL))
        self.max_rows = n_blocks * geometry.block_size
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

    def restore(self, n_rows: int, sink: RowSink, buffers: RowBuffers) -> None:
        """Hands the first n_rows of every layer to the sink, in file order.

        Raises StoreUnavailable, SnapshotGone, SnapshotRejected(size_mismatch) when the file shrinks meanwhile; the
        sink may then hold a part.
        """
        for layer in range(self.header.n_layers):
            for segment in vlkv.segments(self.geometry, self.n_tokens, n_rows, layer, buffers.max_rows):
                read_exactly(self._fs, self._fd, buffers.pieces(segment), segment.offset, self.path)
                n = segment.stop - segment.start
                sink.write_rows(layer, segment.start, buffers.k[:n], buffers.v[:n])

    def restore_q8(self, n_rows: int, sink: Q8Sink) -> None:
        """Hands the first n_rows of every layer of a version 2 file to the sink, record runs in file order.

        A partial read skips the rest of a layer by whole records, scales included. Raises as ``restore`` does, and
        SnapshotRejected(bad_scale).
        """
        records = Q8Records(self.geometry, min(n_rows, RECORDS_PER_CALL))
        for layer in range(self.header.n_layers):
            for start in range(0, n_rows, records.n_records):
                n = min(records.n_records, n_rows - start)
                offset = vlkv.q8_record_offset(self.geometry, self.n_tokens, layer, start)
                read_exactly(self._fs, self._fd, [records.bytes(n)], offset, self.path)
                columns = records.columns(n)
                try:
                    check_scales(*columns[2:])
                except SnapshotRejected as error:
                    raise error.at(self.path) from None
                sink.write_q8(layer, start, *columns)


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
        yield fd, Identity(status.st_ino, status.st_size, status.st_mtime_ns)
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
