"""A full disk, told by the one who started a process: the process itself cannot, since its log lies there as well."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

PROBE_BYTES: Final = 64 << 10
"""A process that finds less than this cannot do its work, and perhaps not even say so."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def why_full(folder: Path) -> str | None:
    """A sentence without its stop when the disk of `folder` takes no more; None when it does, or is broken."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            n_written = probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return _sentence(folder, error.errno) if error.errno in _FULL else None
    return None if n_written == PROBE_BYTES else _sentence(folder, errno.ENOSPC)


def reason_of(error: OSError, folder: Path) -> str:
    """Why something could not be made in `folder`: the disk is full, or the system's words and the file."""
    if error.errno in _FULL:
        return _sentence(folder, error.errno)
    reason = (error.strerror or str(error)).lower()
    return f"{os.fsdecode(error.filename)}: {reason}" if error.filename is not None else reason


def _sentence(folder: Path, number: int | None) -> str:
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        disk = os.statvfs(existing)
        n_free = f"{disk.f_bavail * disk.f_frsize} bytes free"
        has_no_files = disk.f_files > 0 and disk.f_favail == 0  # some file systems do not count them
    except OSError:
        n_free, has_no_files = "no bytes free", False
    used_up = " and no file more" if has_no_files else " and a quota that is used up" if number == errno.EDQUOT else ""
    return f"the disk of {folder} is full, with {n_free}{used_up}: make room there, or use a folder on another disk"
