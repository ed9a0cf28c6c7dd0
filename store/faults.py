"""A file system that fails on request: for tests and for drills.

Each fault names the call, how often it fails, and how: before anything is done, or after it was done (a lost reply of
a network file system). ``max_io_bytes`` makes every read and write a short one; ``on_call`` is told of each call, for
kills and interleavings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvferry.store.fs import Buffer, FileSystem, PosixFileSystem

T = TypeVar("T")

CALLS: Final = (
    "open_read",
    "create",
    "close",
    "fstat",
    "lstat",
    "names",
    "preadv",
    "writev",
    "begin_sync",
    "fsync",
    "fsync_directory",
    "link",
    "rename",
    "unlink",
    "make_directories",
    "touch",
    "free_bytes",
)


@dataclass(slots=True)
class Fault:
    """Lets a call fail with ``errno``: from its ``skip``-th time on, ``times`` times (None: for ever)."""

    call: str
    errno: int
    skip: int = 0
    times: int | None = None
    after_doing: bool = False
    n_seen: int = 0

    def strikes(self, call: str) -> bool:
        """Counts a call and says whether it fails."""
        if call != self.call:
            return False
        self.n_seen += 1
        n_struck = self.n_seen - self.skip
        return n_struck > 0 and (self.times is None or n_struck <= self.times)


class FaultyFileSystem:
    """Passes every call on to ``inner`` unless a fault strikes. Faults may be added and cleared at any time; not
    thread-safe."""

    def __init__(
        self,
        *faults: Fault,
        inner: FileSystem | None = None,
        max_io_bytes: int | None = None,
        on_call: Callable[[str], None] | None = None,
    ) -> None:
        self.faults = list(faults)
        self.calls: list[str] = []
        self._inner: FileSystem = PosixFileSystem() if inner is None else inner
        self._max_io_bytes = max_io_bytes
        self._on_call = on_call

    has_descriptors = False  # or faults would not strike

    @property
    def read_bytes(self) -> int:
        return self._inner.read_bytes

    @property
    def has_renames(self) -> bool:
        return self._inner.has_renames

    def _do(self, call: str, action: Callable[[], T]) -> T:
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)
        for fault in self.faults:
            if fault.strikes(call):
                if fault.after_doing:
                    action()
                raise OSError(fault.errno, f"{os.strerror(fault.errno)} (injected at {call})")
        return action()

    def _short(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        return buffers if self._max_io_bytes is None else [buffers[0][: self._max_io_bytes]]

    def open_read(self, path: str) -> int:
        return self._do("open_read", lambda: self._inner.open_read(path))

    def create(self, path: str) -> int:
        return self._do("create", lambda: self._inner.create(path))

    def close(self, fd: int) -> None:
        self._do("close", lambda: self._inner.close(fd))

    def fstat(self, fd: int) -> os.stat_result:
        return self._do("fstat", lambda: self._inner.fstat(fd))

    def lstat(self, path: str) -> os.stat_result:
        return self._do("lstat", lambda: self._inner.lstat(path))

    def names(self, directory: str) -> list[str]:
        return self._do("names", lambda: self._inner.names(directory))

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return self._do("preadv", lambda: self._inner.preadv(fd, self._short(buffers), offset))

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        return self._do("writev", lambda: self._inner.writev(fd, self._short(buffers)))

    def begin_sync(self, fd: int, offset: int, n_bytes: int) -> None:
        self._do("begin_sync", lambda: self._inner.begin_sync(fd, offset, n_bytes))

    def fsync(self, fd: int) -> None:
        self._do("fsync", lambda: self._inner.fsync(fd))

    def fsync_directory(self, directory: str) -> None:
        self._do("fsync_directory", lambda: self._inner.fsync_directory(directory))

    def link(self, source: str, target: str) -> None:
        self._do("link", lambda: self._inner.link(source, target))

    def rename(self, source: str, target: str) -> None:
        self._do("rename", lambda: self._inner.rename(source, target))

    def unlink(self, path: str) -> None:
        self._do("unlink", lambda: self._inner.unlink(path))

    def make_directories(self, path: str) -> None:
        self._do("make_directories", lambda: self._inner.make_directories(path))

    def touch(self, path: str) -> None:
        self._do("touch", lambda: self._inner.touch(path))

    def free_bytes(self, directory: str) -> int:
        return self._do("free_bytes", lambda: self._inner.free_bytes(directory))
