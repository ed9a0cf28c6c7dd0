"""Writing a snapshot so that a crash at any instant leaves either nothing under its name or all of it.

Temp file in the same directory, streamed block by block, length checked, fsync, checked close, published by a hard
link (which never replaces anything), temp name removed, directory fsync. A crash leaves only a ``.tmp``, which
reaping takes away.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import numpy as np

from kvferry.store import vlkv
from kvferry.store.errors import NameTaken, SnapshotGone, SnapshotRejected, StoreUnavailable, os_errors_mapped
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry, RowSource, TokenIds
from kvferry.store.q8 import RECORDS_PER_CALL, Q8Records, Q8Source, check_scales
from kvferry.store.reader import RowBuffers, after, open_snapshot

# What file systems without hard links say (FAT, some FUSE and SMB mounts).
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
# What file systems say that cannot sync a directory; the entry is then as durable as they make it.
_NO_DIRECTORY_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
# Each lost contest means that another writer published the same tokens and an evictor took them, between two calls of
# ours.
_MAX_CONTESTS: Final = 8

# Rows gathered before a write: at 1 GB/s it is 1 ms of work, and the rows are still in the processor's cache then.
RUN_BYTES: Final = 1 << 20

# Written before the disk is told to begin with it, so that it works while the rest is gathered; longer than a disk's
# own pieces.
BEGIN_BYTES: Final = 8 << 20

Outcome = Literal["published", "already_there"]


class TempFile:
    """A file being written under a temporary name. It removes itself unless it was published.

    Made by create_temp; use from one thread.
    """

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self._fs = fs
        self.path = path
        with os_errors_mapped("create", path):
            self._fd: int | None = fs.create(str(path))
        self.n_written = 0
        self._n_begun = 0  # of these bytes the disk has been told

    def created_at_ns(self) -> int:
        """Its mtime, which is the file system's own time. Raises StoreUnavailable."""
        assert self._fd is not None  # noqa: S101 -- asked for before close only
        with os_errors_mapped("look at", self.path):
            return self._fs.fstat(self._fd).st_mtime_ns

    def write(self, pieces: list[memoryview]) -> None:
        """Appends the pieces, going on after short writes. Raises StoreFull, StoreUnavailable."""
        assert self._fd is not None  # noqa: S101 -- as above
        left = pieces
        while left:
            with os_errors_mapped("write", self.path):
                n = self._fs.writev(self._fd, left)
            self.n_written += n
            left = after(left, n)
        n_new = self.n_written - self._n_begun
        if n_new >= BEGIN_BYTES:
            with suppress(OSError):  # what is wrong will be told by fsync
                self._fs.begin_sync(self._fd, self._n_begun, n_new)
            self._n_begun = self.n_written

    def finish(self, n_expected: int) -> int:
        """Checks the length, makes the bytes durable, closes and believes what close says; returns the inode.

        Raises StoreFull, StoreUnavailable. After a failed fsync nothing is retried: the kernel may have dropped the
        pages.
        """
        assert self._fd is not None  # noqa: S101 -- finished once
        with os_errors_mapped("sync", self.path):
            status = self._fs.fstat(self._fd)
            self._fs.fsync(self._fd)
        fd, self._fd = self._fd, None
        with os_errors_mapped("close", self.path):
            self._fs.close(fd)
        if status.st_size != n_expected:
            raise StoreUnavailable(
                f"{self.path} has {status.st_size} bytes after {n_expected} were written", op="write", path=self.path
            )
        return status.st_ino

    def discard(self) -> None:
        """Closes and removes it as far as the file system lets us; what stays is reaped at the next start."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):
                self._fs.close(fd)
        with suppress(OSError):
            self._fs.unlink(str(self.path))


@contextmanager
def create_temp(fs: FileSystem, path: Path) -> Iterator[TempFile]:
    """A new temporary file, gone again at the end of the block whatever happened (published files have their second
    name)."""
    temp = TempFile(fs, path)
    try:
        yield temp
    finally:
        temp.discard()


def write_snapshot(temp: TempFile, geometry: KvGeometry, token_ids: TokenIds, token_hash: int, rows: RowSource) -> int:
    """Streams header, ids and rows into the temp file; returns its inode once the bytes are durable.

    Memory: RUN_BYTES, whatever the snapshot's size. Raises StoreFull, StoreUnavailable.
    """
    ids = token_ids.astype("<i4", copy=False)
    n_tokens = len(ids)
    buffers = RowBuffers(geometry, RUN_BYTES)
    header = vlkv.build_header(geometry, n_tokens, token_hash)
    temp.write([memoryview(header), np.ascontiguousarray(ids).data.cast("B")])
    for layer in range(geometry.n_layers):
        for segment in vlkv.segments(geometry, n_tokens, n_tokens, layer, buffers.max_rows):
            n = segment.stop - segment.start
            rows.read_rows(layer, segment.start, segment.stop, buffers.k[:n], buffers.v[:n])
            temp.write(buffers.pieces(segment))
    return temp.finish(vlkv.file_bytes(geometry, n_tokens))


def write_q8_snapshot(
    temp: TempFile, geometry: KvGeometry, token_ids: TokenIds, token_hash: int, rows: Q8Source
) -> int:
    """Streams a version 2 file into the temp file; returns its inode once the bytes are durable.

    Raises StoreFull, StoreUnavailable, SnapshotRejected(bad_scale) for rows that every reader would refuse.
    """
    ids = np.ascontiguousarray(token_ids.astype("<i4", copy=False))
    header = vlkv.build_header(geometry, len(ids), token_hash, vlkv.VERSION_Q8)
    temp.write([memoryview(header), ids.data.cast("B")])
    records = Q8Records(geometry, min(len(ids), RECORDS_PER_CALL))
    for layer in range(geometry.n_layers):
        for start in range(0, len(ids), records.n_records):
            n = min(records.n_records, len(ids) - start)
            columns = records.columns(n)
            rows.read_q8(layer, start, start + n, *columns)
            check_scales(*columns[2:])
            temp.write([records.bytes(n)])
    return temp.finish(vlkv.file_bytes(geometry, len(ids), vlkv.VERSION_Q8))


def publish(fs: FileSystem, temp: Path, final: Path, inode: int, confirm: Callable[[], None]) -> Outcome:
    """Gives a finished temp file its final name, never replacing a file, and makes the name durable.

    ``confirm`` looks whether a file that has the name already is as good; it raises NameTaken, or SnapshotGone.
    Raises NameTaken, StoreFull, StoreUnavailable.
    """
    for _ in range(_MAX_CONTESTS):
        if _take_name(fs, temp, final, inode):
            sync_directory(fs, final.parent)
            return "published"
        try:
            confirm()
        except SnapshotGone:
            continue  # whoever had the name lost it to an eviction before we could look
        sync_directory(fs, final.parent)
        return "already_there"
    raise StoreUnavailable(
        f"not saved: {final} comes and goes faster than it can be looked at", op="publish", path=final
    )


def _take_name(fs: FileSystem, temp: Path, final: Path, inode: int) -> bool:
    """Whether the name is ours now. A call that failed may have been done all the same (a lost NFS reply): the inode
    tells."""
    with os_errors_mapped("publish", final):
        try:
            fs.link(str(temp), str(final))
        except OSError as error:
            there = _inode_of(fs, final)
            if there == inode:
                return True
            if there is not None or error.errno == errno.EEXIST:
                return False
            if error.errno not in _NO_LINKS:
                raise
            # Without links: rename. Another writer in between writes the same bytes under the same name, so replacing
            # it is harmless.
            try:
                fs.rename(str(temp), str(final))
            except OSError:
                if _inode_of(fs, final) != inode:
                    raise
    return True


def _inode_of(fs: FileSystem, path: Path) -> int | None:
    try:
        return fs.lstat(str(path)).st_ino
    except FileNotFoundError:
        return None


def confirm_same(fs: FileSystem, final: Path, geometry: KvGeometry, token_ids: TokenIds) -> None:
    """The file that has the name is a good snapshot of the same token ids.

    Raises NameTaken when it is not, SnapshotGone when there is no such file, StoreUnavailable.
    """
    try:
        with open_snapshot(fs, final, geometry) as there:
            same = np.array_equal(there.token_ids(), token_ids)
    except SnapshotRejected as error:
        raise NameTaken(
            f"not saved: the name is taken by a file that is refused ({error.reason}): {final}", path=final
        ) from error
    if not same:
        raise NameTaken(
            f"not saved: {final} holds other token ids with the same hash, and the older file stays", path=final
        )


def sync_directory(fs: FileSystem, directory: Path) -> None:
    """Makes the directory's entries durable where the file system can. Raises StoreUnavailable."""
    with os_errors_mapped("sync directory", directory):
        try:
            fs.fsync_directory(str(directory))
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
