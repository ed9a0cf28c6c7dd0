"""Flips a bit of snapshot files, as a dying disk does: nobody is told, and their size and times stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PATTERN: Final = "kv*.kv"

FLIPPED: Final = 0x10


def rot_all(store: Path) -> int:
    """Flips one bit three quarters into every published file; how many files there were."""
    paths = [path for path in store.rglob(PATTERN) if path.is_file() and not path.is_symlink()]
    for path in paths:
        _flip(path)
    return len(paths)


def _flip(path: Path) -> None:
    before = path.stat()
    offset = (before.st_size - 1) * 3 // 4
    path.chmod(before.st_mode | 0o200)
    with path.open("r+b") as file:
        file.seek(offset)
        right = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([right ^ FLIPPED]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(before.st_mode)
