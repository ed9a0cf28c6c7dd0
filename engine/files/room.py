"""Room on the disk of the model cache: asked for before a fetch, and said plainly when it runs out meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Final

from rich.filesize import decimal

from kvferry.engine.errors import FetchFailed

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_REFUSED: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


def require_room(folder: Path, n_bytes: int) -> None:
    """Refuse what would not fit on the disk of a cache folder. Raises FetchFailed, OSError."""
    usage = shutil.disk_usage(folder)
    if usage.total > 0 and usage.free < n_bytes:
        raise FetchFailed(_sentence(folder, usage.free, n_bytes))


def storage_fault(folder: Path, error: OSError, n_bytes: int | None = None) -> str | None:
    """The sentence for a write to the cache folder that failed for the disk's reasons; None when it was another."""
    if error.errno in _FULL:
        return _full(folder, n_bytes)
    if error.errno in _REFUSED:
        reason = os.strerror(error.errno)
        return f"the cache folder {folder} cannot be written ({reason}); set KVFERRY_CACHE to another one"
    return None


def full_by_text(folder: Path, text: str, n_bytes: int) -> str | None:
    """The same out of what another program printed."""
    return _full(folder, n_bytes) if any(os.strerror(number) in text for number in _FULL) else None


def _full(folder: Path, n_bytes: int | None) -> str:
    try:
        return _sentence(folder, shutil.disk_usage(folder).free, n_bytes)
    except OSError:
        return _sentence(folder, 0, n_bytes)


def _sentence(folder: Path, n_free: int, n_needed: int | None) -> str:
    needed = f", and the fetch needs {decimal(n_needed)}" if n_needed is not None else ""
    return (
        f"the disk is full: the cache folder {folder} has {decimal(n_free)} left{needed}; "
        "make room, or set KVFERRY_CACHE to a folder on another disk"
    )
