"""Putting a file in its place so that a crash at any instant leaves the old one, the new one or none, never a part."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

TEMP_PREFIX: Final = ".tmp-"

# A fetch of the largest model over a slow line takes hours; what is older than this belongs to nobody.
TEMP_AGE_S_MAX: Final = 24 * 3600.0
_LOCKED_BY_S: Final = 1.0  # a file is locked right after it is made


@contextmanager
def published(final: Path) -> Iterator[BinaryIO]:
    """A file to write into; it appears under its final name, durably, when the block ends without an error.

    The temporary name is unique, so two writers of the same file do not meet; the last one to finish wins, whole.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temp = final.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        with temp.open("xb") as file:
            with suppress(OSError):  # tells a reaper that we live, where the file system has such locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temp.replace(final)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a file's own fsync does not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reap_leftovers(folder: Path, *, now_s: float | None = None, locked_by_writers: bool = False) -> int:
    """Delete temporary files and folders that a killed writer left in a folder long ago; how many there were.

    Young ones may belong to a fetch that is running in another process, so they stay. ``locked_by_writers``: there are
    none but those of ``published``, which says by a lock that it lives, so what nobody holds goes at once.
    """
    now_s = time.time() if now_s is None else now_s
    n_reaped = 0
    for path in folder.glob(f"{TEMP_PREFIX}*"):
        try:
            changed_s = max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
            age_s = now_s - changed_s
            is_orphan = locked_by_writers and age_s > _LOCKED_BY_S and _is_unlocked(path)
            if age_s <= TEMP_AGE_S_MAX and not is_orphan:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            n_reaped += 1
        except FileNotFoundError:
            continue  # its writer, or another reaper, was faster
    return n_reaped


def _is_unlocked(path: Path) -> bool:
    """Whether no process holds a file's lock. False where that cannot be told."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True
