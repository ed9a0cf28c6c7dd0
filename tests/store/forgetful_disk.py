"""A FUSE disk that forgets: `forgetful_disk.py MOUNT KEPT N`. After N changing calls the power is gone.

Everything lies in memory. ``fsync`` of a file keeps its bytes, ``fsync`` of a folder keeps its entries; only what was
kept goes to the folder KEPT when the disk is unmounted. A file whose entry was kept but not its bytes is there, empty.
"""

from __future__ import annotations

import errno
import itertools
import stat
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy as fuse


class ForgetfulDisk(fuse.Operations):  # type: ignore[misc]  # mfusepy has no types here
    """Folders and files by path; a hard link is a second path of one content."""

    use_ns = True

    def __init__(self, n_changes: int) -> None:
        self.left = n_changes
        self.folders = {"/"}
        self.files: dict[str, int] = {}
        self.contents: dict[int, bytearray] = {}
        self.synced: dict[int, bytes] = {}
        self.durable_folders = {"/"}
        self.durable: dict[str, int] = {}
        self.times: dict[str, int] = {}
        self.numbers = itertools.count(2)

    def _changes(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise fuse.FuseOSError(errno.EIO)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        now = self.times.get(path, time.time_ns())
        times = {"st_mtime": now, "st_ctime": now, "st_atime": now}
        if path in self.folders:
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2, **times}
        if path not in self.files:
            raise fuse.FuseOSError(errno.ENOENT)
        inode = self.files[path]
        n_links = sum(other == inode for other in self.files.values())
        size = len(self.contents[inode])
        return {"st_mode": stat.S_IFREG | 0o640, "st_nlink": n_links, "st_size": size, "st_ino": inode, **times}

    def readdir(self, path: str, fh: int) -> list[str]:
        prefix = path.rstrip("/") + "/"
        below = [*self.files, *self.folders]
        return [".", "..", *(name[len(prefix) :] for name in below if _is_child(name, prefix))]

    def mkdir(self, path: str, mode: int) -> int:
        self._changes()
        self.folders.add(path)
        self.durable_folders.add(path)  # promise 2 is about files
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._changes()
        self.files[path] = next(self.numbers)
        self.contents[self.files[path]] = bytearray()
        self.times[path] = time.time_ns()
        return self.files[path]

    def open(self, path: str, flags: int) -> int:
        return self.files[path]

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self.contents[fh][offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._changes()
        self.contents[fh][offset : offset + len(data)] = data
        return len(data)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._changes()
        self.synced[fh] = bytes(self.contents[fh])
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._changes()
        prefix = path.rstrip("/") + "/"
        self.durable = {name: inode for name, inode in self.durable.items() if not _is_child(name, prefix)}
        self.durable |= {name: inode for name, inode in self.files.items() if _is_child(name, prefix)}
        return 0

    def link(self, target: str, source: str) -> int:
        self._changes()
        if target in self.files:
            raise fuse.FuseOSError(errno.EEXIST)
        self.files[target] = self.files[source]
        return 0

    def unlink(self, path: str) -> int:
        self._changes()
        del self.files[path]
        return 0

    def rename(self, old: str, new: str) -> int:
        self._changes()
        self.files[new] = self.files.pop(old)
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1 << 20, "f_bavail": 1 << 20, "f_bfree": 1 << 20}


def _is_child(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name != prefix and "/" not in name[len(prefix) :]


def main() -> None:
    mount, kept, n_changes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    disk = ForgetfulDisk(n_changes)
    fuse.FUSE(disk, mount, foreground=True, nothreads=True, attr_timeout=0, entry_timeout=0)
    for folder in sorted(disk.durable_folders - {"/"}):
        (kept / folder[1:]).mkdir(parents=True, exist_ok=True)
    for name, inode in disk.durable.items():
        (kept / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        (kept / name[1:]).write_bytes(disk.synced.get(inode, b""))


main()
