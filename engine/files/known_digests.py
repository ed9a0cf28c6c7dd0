"""Digests of large files, remembered for as long as the file is the very one that was hashed.

Hashing a model of 60 GB takes a minute of every start. A file counts as unchanged when its inode, size and both times
are what they were; the system sets the change time itself, so no ordinary program can write to a file and keep it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Final

from kvferry.engine.files.catalogue import cache_root
from kvferry.engine.files.digest import file_sha256
from kvferry.engine.files.publish import published

# A file written to within the clock's grain after it was hashed could keep its times; one this old cannot.
_SETTLED_NS: Final = 2_000_000_000
_RECORD_BYTES_MAX: Final = 1 << 16


def remembered_sha256(path: Path) -> str | None:
    """The digest of a file's bytes, if it was hashed as it is now; else None."""
    try:
        with _record_of(path).open("rb") as file:
            record = json.loads(file.read(_RECORD_BYTES_MAX))
        known = str(record["sha256"])
        return known if record["state"] == _state(path) and len(known) == 64 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hashed_sha256(path: Path) -> str:
    """Hash a file's bytes, and remember what came out where that can be done. Raises OSError."""
    before, began_at_ns = _state(path), time.time_ns()
    sha256 = file_sha256(path)
    settled = began_at_ns - max(before["changed_ns"], before["modified_ns"]) > _SETTLED_NS
    if settled and _state(path) == before:
        body = {"path": str(path.absolute()), "sha256": sha256, "state": before}
        with contextlib.suppress(OSError), published(_record_of(path)) as out:  # a read-only cache: hash every time
            out.write(json.dumps(body, indent=1).encode() + b"\n")
    return sha256


def _record_of(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
    return cache_root() / "digests" / f"{name}.json"


def _state(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {
        "device": stat.st_dev,
        "inode": stat.st_ino,
        "bytes": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
        "changed_ns": stat.st_ctime_ns,
    }
