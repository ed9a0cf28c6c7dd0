"""Whether a path that a person gave is a file that can be read from beginning to end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

NOT_THERE: Final = "does not exist"


def fault_of(path: Path) -> str | None:
    """What keeps us from reading a path as a file, to end a sentence that begins with it; None when nothing does.

    Opening a pipe would wait for whoever writes into it, perhaps for ever, and a device may have no end, so only
    regular files will do.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return NOT_THERE
    except (OSError, ValueError) as error:
        return f"cannot be reached ({getattr(error, 'strerror', None) or error})"
    if stat.S_ISDIR(mode):
        return "is a folder, not a file"
    if not stat.S_ISREG(mode):
        return "is a pipe, a socket or a device, not a file; copy what it holds into a file first"
    return None if os.access(path, os.R_OK) else "cannot be read (Permission denied)"


def exists(path: Path) -> bool:
    """Whether anything is there, as far as we may look; ``Path.exists`` raises for some paths that cannot be."""
    return os.path.exists(path)  # noqa: PTH110 - it never raises
