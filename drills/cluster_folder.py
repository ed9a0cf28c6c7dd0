"""The folder of a local cluster: its files and logs, held by one cluster at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvferry.drills.disk import reason_of
from kvferry.drills.errors import DirectoryBusy


class ClusterFolder:
    """Made if it is missing. Raises DirectoryBusy when it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None
        for part in ("state", "store", "run", "logs"):
            try:
                (path / part).mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise self._unusable(error) from error

    @property
    def is_locked(self) -> bool:
        """By us."""
        return self._lock_fd is not None

    def lock(self) -> None:
        """One cluster per folder: two would share a registry. The kernel frees the lock when this process ends.

        Raises DirectoryBusy.
        """
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DirectoryBusy(f"Another cluster runs in {self.path}; stop it, or choose another --dir.") from None
        self._lock_fd = fd

    def unlock(self) -> None:
        """No error when it was not locked."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def sweep(self) -> None:
        """Half-written files of processes that were killed. Only while it is locked and nobody runs in it."""
        for part in ("store", "run"):
            for pattern in ("*.tmp", ".tmp-*"):
                for path in (self.path / part).rglob(pattern):
                    if path.is_file() and not path.is_symlink():
                        path.unlink(missing_ok=True)

    def _unusable(self, error: OSError) -> DirectoryBusy:
        return DirectoryBusy(f"Cannot use {self.path} as a directory of the cluster: {reason_of(error, self.path)}.")
