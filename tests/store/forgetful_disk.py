"""A FUSE disk that notes every change: `forgetful_disk.py MOUNT NOTES`. When it is unmounted, NOTES has them, in JSON.

Everything lies in memory. Who looks for a name that begins with "told-" notes that, too: it is how a writer says, in
order with its calls, what it was told is saved. test_forgetful_disk works out what a cut after any of the calls leaves.
"""

from __future__ import annotations

import errno
import itertools
import json
import stat
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy as fuse


class ForgetfulDisk(fuse.Operations):  # type: ignore[misc]  # mfusepy has no types here
    """Folders and files by path; a hard link is a second path of one content."""

    use_ns = True

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.folders = {"/"}
        self.files: dict[str, int] = {}
        self.contents: dict[int, bytearray] = {}
        self.times: dict[str, int] = {}
        self.numbers = itertools.count(2)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path.startswith("/told-"):
            self.notes.append(("told", int(path.removeprefix("/told-"))))
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
        inside = (name for name in below if name.startswith(prefix) and "/" not in name[len(prefix) :])
        return [".", "..", *(name[len(prefix) :] for name in inside if name != prefix)]

    def mkdir(self, path: str, mode: int) -> int:
        self.folders.add(path)
        self.notes.append(("mkdir", path))
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self.files[path] = next(self.numbers)
        self.contents[self.files[path]] = bytearray()
        self.times[path] = time.time_ns()
        self.notes.append(("name", path, self.files[path]))
        return self.files[path]

    def open(self, path: str, flags: int) -> int:
        return self.files[path]

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self.contents[fh][offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self.contents[fh][offset : offset + len(data)] = data
        self.notes.append(("write", fh, offset, data.hex()))
        return len(data)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.notes.append(("fsync", fh))
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self.notes.append(("fsyncdir", path))
        return 0

    def link(self, target: str, source: str) -> int:
        if target in self.files:
            raise fuse.FuseOSError(errno.EEXIST)
        self.files[target] = self.files[source]
        self.notes.append(("name", target, self.files[source]))
        return 0

    def unlink(self, path: str) -> int:
        del self.files[path]
        self.notes.append(("unname", path))
        return 0

    def rename(self, old: str, new: str) -> int:
        self.files[new] = self.files.pop(old)
        self.notes.append(("rename", old, new, self.files[new]))
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1 << 20, "f_bavail": 1 << 20, "f_bfree": 1 << 20}


def main() -> None:
    disk = ForgetfulDisk()
    fuse.FUSE(disk, sys.argv[1], foreground=True, nothreads=True, attr_timeout=0, entry_timeout=0, negative_timeout=0)
    Path(sys.argv[2]).write_text(json.dumps(disk.notes))


if __name__ == "__main__":
    main()
