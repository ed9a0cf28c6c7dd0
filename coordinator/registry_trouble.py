"""What a person can do about an error of SQLite."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Final

SCARCE_BYTES: Final = 1 << 20
"""With less than this free, SQLite cannot even make its write-ahead log, and calls that by other names."""

DAMAGED: Final = (
    "the file is damaged or no registry: put a backup of it in its place, or move it away (with the -wal and -shm "
    "files beside it) and start without the conversations in it"
)
FOREIGN: Final = "the file is another program's, or damaged: move it away, or give another folder with --state"
NOT_ALLOWED: Final = "look at who owns the state folder and how it is mounted"
HELD: Final = "another program holds the file: end it"
BROKEN: Final = "look at the state folder's disk"

_PRIMARY: Final = 0xFF
_FULL: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
_ADVICE: Final = {
    sqlite3.SQLITE_NOTADB: DAMAGED,
    sqlite3.SQLITE_CORRUPT: DAMAGED,
    sqlite3.SQLITE_ERROR: FOREIGN,
    sqlite3.SQLITE_READONLY: NOT_ALLOWED,
    sqlite3.SQLITE_PERM: NOT_ALLOWED,
    sqlite3.SQLITE_CANTOPEN: NOT_ALLOWED,
    sqlite3.SQLITE_BUSY: HELD,
    sqlite3.SQLITE_LOCKED: HELD,
}


def what_to_do(error: sqlite3.Error, path: Path) -> str:
    """A half-sentence about the registry at ``path``."""
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY  # misuse of the module has none
    n_free = free_bytes(path.parent) if code in _FULL else None
    if n_free is not None and (code == sqlite3.SQLITE_FULL or n_free < SCARCE_BYTES):
        return f"its disk has {n_free} bytes free: make room there"
    return _ADVICE.get(code, BROKEN)


def free_bytes(folder: Path) -> int | None:
    """None when the disk does not even say that."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
