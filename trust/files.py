"""Secrets on disk: whole or not there, and readable by their owner only."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvferry.terminal.output_file import output_file

SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644

Stamp = tuple[tuple[int, int, int] | None, ...]


def write_atomically(path: Path, data: bytes, mode: int) -> None:
    """A reader sees the old file or the new one; what a crash leaves is a hidden temporary file. Raises OSError."""
    with output_file(path, mode) as file:
        file.write(data)


def stamp_of(*paths: Path) -> Stamp:
    """What changes whenever one of the files does; None in the place of one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def reason_of(error: OSError) -> str:
    """The system's own words."""
    return (error.strerror or str(error)).lower()
