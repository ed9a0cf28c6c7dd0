"""Serves a folder through FUSE: `python -m kvferry.drills.targets.fuse_server BEHIND MOUNT FULL`.

Every call goes to the folder BEHIND; while the file FULL exists there is no room. It hangs when it is stopped by
SIGSTOP, and ends when it is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import mfusepy as fuse


class Folder(fuse.Operations):  # type: ignore[misc]  # mfusepy has no types here
    """Paths are absolute within the mount."""

    use_ns = True

    def __init__(self, behind: Path, full: Path) -> None:
        self._behind = behind
        self._full = full

    def _at(self, path: str) -> str:
        return f"{self._behind}{path}"

    def _needs_room(self) -> None:
        if self._full.exists():
            raise fuse.FuseOSError(errno.ENOSPC)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
        names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
        times = {f"st_{kind}time": getattr(status, f"st_{kind}time_ns") for kind in "amc"}
        return {name: getattr(status, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._at(path))
        told = {name: getattr(status, name) for name in dir(status) if name.startswith("f_") and name != "f_fsid"}
        return told | {"f_bavail": 0, "f_bfree": 0} if self._full.exists() else told

    def mkdir(self, path: str, mode: int) -> int:
        self._needs_room()
        os.mkdir(self._at(path), mode)
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._needs_room()
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_CREAT)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._needs_room()
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path) if fh is None else fh, length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target), follow_symlinks=False)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._at(path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        if times is None:
            os.utime(self._at(path))
        else:
            os.utime(self._at(path), ns=times)
        return 0


if __name__ == "__main__":
    behind, mount, full = sys.argv[1:]
    fuse.FUSE(Folder(Path(behind), Path(full)), mount, foreground=True, nothreads=False, default_permissions=True)
