"""SHA-256 of model files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 1 << 20  # large enough that hashing, not the calls, takes the time

# Called with (bytes done, bytes in all) of one piece of work.
Progress = Callable[[int, int], None]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Show nothing."""


def file_sha256(path: Path, progress: Progress = no_progress) -> str:
    """The digest of a file's bytes in hex. Raises OSError."""
    digest = hashlib.sha256()
    total_bytes = path.stat().st_size
    done_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            progress(done_bytes, total_bytes)
    return digest.hexdigest()
