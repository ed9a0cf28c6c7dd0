"""The few operating system calls the store makes, behind one seam, so that every one of them can be made to fail.

FileSystem is the contract, PosixFileSystem the real thing, and FaultyFileSystem (faults.py) the one for tests and
drills.
"""

# This file is the operating system seam; pathlib would only wrap the same calls once more.
# ruff: noqa: PTH103, PTH104, PTH108, PTH208

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Protocol

Buffer = memoryview

READ_FLAGS = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
)  # NONBLOCK: opening a FIFO must not wait for a writer
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE = 0o640  # snapshots hold conversations: no access for the world
DIRECTORY_MODE = 0o750

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it, Python does not
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class FileSystem(Protocol):
    """What the store asks of an operating system. Every method may raise OSError; none retries.

    ``read_bytes``: how much of a file one ``preadv`` should ask for. On a disk that gives 5 MB/s even the largest, of 4
    MiB, shows every second that a restore gets on.
    """

    @property
    def read_bytes(self) -> int: ...

    @property
    def has_descriptors(self) -> bool:
        """Whether ``open_read`` gives descriptors that others may read from on their own."""

    @property
    def has_renames(self) -> bool:
        """Whether ``rename`` is one step, after which the file is the same one with the same times."""

    def open_read(self, path: str) -> int:
        """Opens an existing file, never through a symbolic link; never waits."""

    def create(self, path: str) -> int:
        """Creates a file that must not be there yet, for writing."""

    def close(self, fd: int) -> None:
        """Closes; late write errors of a network file system come out here."""

    def fstat(self, fd: int) -> os.stat_result:
        """Attributes of an open file."""

    def lstat(self, path: str) -> os.stat_result:
        """Attributes of a directory entry itself."""

    def names(self, directory: str) -> list[str]:
        """All entries of a directory, in no particular order."""

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Reads into the buffers, one after the other; returns the bytes read, perhaps fewer than asked, 0 at the
        end."""

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        """Writes the buffers, one after the other; returns the bytes written, perhaps fewer than given."""

    def begin_sync(self, fd: int, offset: int, n_bytes: int) -> None:
        """Lets the disk begin to write bytes that were written to a file, so that ``fsync`` waits for less: a hint."""

    def fsync(self, fd: int) -> None:
        """Makes a file's bytes durable."""

    def fsync_directory(self, directory: str) -> None:
        """Makes a directory's entries durable."""

    def link(self, source: str, target: str) -> None:
        """A second name for a file; fails when the name is taken."""

    def rename(self, source: str, target: str) -> None:
        """Another name for a file; replaces whatever has it."""

    def unlink(self, path: str) -> None:
        """Removes a name."""

    def make_directories(self, path: str) -> None:
        """Makes a directory and what is missing above it."""

    def touch(self, path: str) -> None:
        """Sets a file's mtime to the file system's now."""

    def free_bytes(self, directory: str) -> int:
        """Bytes that may still be written to this file system."""


class PosixFileSystem:
    """The operating system itself, which reads ahead of calls that follow each other in a file."""

    read_bytes = 2 << 20
    has_descriptors = True
    has_renames = True

    def open_read(self, path: str) -> int:
        return os.open(path, READ_FLAGS)

    def create(self, path: str) -> int:
        return os.open(path, CREATE_FLAGS, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def names(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        return os.writev(fd, buffers)

    def begin_sync(self, fd: int, offset: int, n_bytes: int) -> None:
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, n_bytes, _SYNC_FILE_RANGE_WRITE)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_directory(self, directory: str) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directories(self, path: str) -> None:
        os.makedirs(path, mode=DIRECTORY_MODE, exist_ok=True)

    def touch(self, path: str) -> None:
        os.utime(path, follow_symlinks=False)

    def free_bytes(self, directory: str) -> int:
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize
