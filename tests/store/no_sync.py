"""A file system that says it has synced: saves thousands of waits where durability is not what is tested."""

from __future__ import annotations

from kvferry.store.fs import PosixFileSystem


class NoSync(PosixFileSystem):
    def fsync(self, fd: int) -> None:
        pass

    def fsync_directory(self, directory: str) -> None:
        pass
