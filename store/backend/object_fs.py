"""The store's file system contract (store/fs.py) on an object store.

A file being written lies in a local temporary file; under its temporary key stands an empty object, which reserves its
bytes and asks the server what time it is. Publishing uploads it under its final key, if that is free: whole or not at
all. Reads are range requests that name the object's tag, so a replaced object is a stale handle, never mixed bytes.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import stat
import tempfile
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from kvferry.store.backend.objects import ObjectFacts, Objects
from kvferry.store.fs import Buffer

ENDLESS: Final = 1 << 62  # an object store does not say how much it still takes; the budget does
SPOOL_BYTES: Final = 8 << 20  # what a file being written holds in memory before it goes to a local disk


@dataclass(slots=True)
class _Handle:
    """An open object: to read (facts), or to write (spool)."""

    key: str
    facts: ObjectFacts
    spool: BinaryIO | None = None


class ObjectFileSystem:
    """Thread-safe, as the operating system is."""

    has_descriptors = False
    has_renames = False
    read_bytes = 4 << 20  # a call is a request, and the way there takes longer than a MiB does

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._handles: dict[int, _Handle] = {}
        self._written: dict[str, _Handle] = {}  # temporary key -> what will be published
        self._numbers = itertools.count(1 << 20)  # far from real descriptors, so that a mix-up is noticed
        self._lock = threading.Lock()

    def open_read(self, path: str) -> int:
        return self._register(_Handle(path, self._objects.head(_key(path))))

    def create(self, path: str) -> int:
        self._objects.put_new(_key(path), io.BytesIO(), 0)
        facts = self._objects.head(_key(path))
        spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 -- closed when unlinked
        handle = _Handle(path, facts, spool)  # type: ignore[arg-type]  # it is a BinaryIO in all but name
        with self._lock:
            self._written[path] = handle
        return self._register(handle)

    def _register(self, handle: _Handle) -> int:
        with self._lock:
            number = next(self._numbers)
            self._handles[number] = handle
        return number

    def close(self, fd: int) -> None:
        with self._lock:
            if self._handles.pop(fd, None) is None:
                raise OSError(errno.EBADF, "Bad file descriptor")

    def fstat(self, fd: int) -> os.stat_result:
        handle = self._handle(fd)
        n_bytes = handle.facts.n_bytes if handle.spool is None else handle.spool.tell()
        return _status(stat.S_IFREG | 0o640, handle.facts, n_bytes)

    def lstat(self, path: str) -> os.stat_result:
        try:
            facts = self._objects.head(_key(path))
        except FileNotFoundError:
            if not self._objects.names(_folder_key(path)):
                raise
            return _status(stat.S_IFDIR | 0o750, ObjectFacts(0, 0, "folder"), 0)
        return _status(stat.S_IFREG | 0o640, facts, facts.n_bytes)

    def names(self, directory: str) -> list[str]:
        return self._objects.names(_folder_key(directory))

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        handle = self._handle(fd)
        n_wanted = min(sum(map(len, buffers)), max(0, handle.facts.n_bytes - offset))
        if not n_wanted:
            return 0
        data = memoryview(self._objects.get(_key(handle.key), offset, offset + n_wanted, handle.facts.tag))
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return min(at, len(data))

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        handle = self._handle(fd)
        if handle.spool is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return sum(handle.spool.write(buffer) for buffer in buffers)

    def begin_sync(self, fd: int, offset: int, n_bytes: int) -> None:
        """Nothing to do before the whole object is sent."""

    def fsync(self, fd: int) -> None:
        self._handle(fd)

    def fsync_directory(self, directory: str) -> None:
        """What the server has acknowledged is durable."""

    def link(self, source: str, target: str) -> None:
        """Uploads what was written under the source's name; raises FileExistsError when the target is taken."""
        with self._lock:
            handle = self._written.get(source)
        if handle is None or handle.spool is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)
        n_bytes = handle.spool.tell()
        handle.spool.seek(0)
        try:
            self._objects.put_new(_key(target), handle.spool, n_bytes)
        finally:
            handle.spool.seek(n_bytes)

    def rename(self, source: str, target: str) -> None:
        self._objects.copy(_key(source), _key(target))
        self._objects.delete(_key(source))

    def unlink(self, path: str) -> None:
        with self._lock:
            handle = self._written.pop(path, None)
        if handle is not None and handle.spool is not None:
            handle.spool.close()
        self._objects.delete(_key(path))

    def make_directories(self, path: str) -> None:
        """Prefixes need no making."""

    def touch(self, path: str) -> None:
        """An object's time cannot be set; evictions go by age then."""

    def free_bytes(self, directory: str) -> int:  # noqa: ARG002 -- the contract's signature
        return ENDLESS

    def _handle(self, fd: int) -> _Handle:
        with self._lock:
            handle = self._handles.get(fd)
        if handle is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return handle


def _key(path: str) -> str:
    return path.strip("/")


def _folder_key(path: str) -> str:
    """What the keys in a folder begin with; nothing for the root."""
    key = _key(path)
    return "" if key in {"", "."} else key + "/"


def _status(mode: int, facts: ObjectFacts, n_bytes: int) -> os.stat_result:
    inode = zlib.crc32(facts.tag.encode()) + 1
    seconds = facts.modified_ns / 1e9
    owner = (os.getuid(), os.getgid())
    times = (*(int(seconds),) * 3, *(seconds,) * 3, *(facts.modified_ns,) * 3)  # as integers, floats, nanoseconds
    return os.stat_result((mode, inode, 0, 1, *owner, n_bytes, *times))
