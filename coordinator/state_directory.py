"""The coordinator's own folder on a local disk, held by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final, Self

import psutil

from kvferry.coordinator.errors import StateInUse, StatePathInvalid
from kvferry.coordinator.registry_trouble import NOT_ALLOWED, free_bytes

REMOTE_FILE_SYSTEMS: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "ceph",
        "afs",
        "glusterfs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "fuse.juicefs",
        "fuse.s3fs",
    }
)
"""SQLite's locks and its write-ahead log are not safe on these (reliability.md section 2)."""


class StateDirectory:
    """Made if it is missing, checked to be local, and locked with ``flock`` until ``release`` or the end of the
    process.

    The kernel drops the lock when the process dies, however it dies, so a crash never leaves a stale one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

    def acquire(self) -> Self:
        """Raises StatePathInvalid and StateInUse."""
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            refuse_remote_file_system(self.path)
            self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except (FileExistsError, NotADirectoryError) as e:
            raise StatePathInvalid(f"the state path {self.path} is a file: give a folder with --state") from e
        except OSError as e:
            raise self._unusable(e) from e
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise StateInUse(
                f"another coordinator (process {holder}) holds the state folder {self.path}: "
                "stop it, or give another folder with --state"
            ) from e
        try:
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as e:
            self.release()
            raise self._unusable(e) from e
        return self

    def _unusable(self, error: OSError) -> StatePathInvalid:
        said = f"the state folder {self.path} cannot be used: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            n_free = free_bytes(self.path)
            return StatePathInvalid(f"{said}, its disk has {n_free} bytes free: make room there")
        return StatePathInvalid(f"{said}; {NOT_ALLOWED}, or give another one with --state")

    def release(self) -> None:
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock_fd)
            self._lock_fd = None


def refuse_remote_file_system(path: Path) -> None:
    """Raises StatePathInvalid when ``path`` lies on a network file system."""
    resolved = path.resolve()
    best = ("", "")
    for partition in psutil.disk_partitions(all=True):
        if resolved.is_relative_to(partition.mountpoint) and len(partition.mountpoint) >= len(best[0]):
            best = (partition.mountpoint, partition.fstype)
    if best[1] in REMOTE_FILE_SYSTEMS:
        raise StatePathInvalid(
            f"the state folder {path} lies on a network file system ({best[1]} at {best[0]}): "
            "give one on a local disk with --state"
        )
