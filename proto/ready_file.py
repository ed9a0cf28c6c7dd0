"""The file in which a process says where it serves, for whoever started it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Final

from kvferry.terminal.output_file import output_file

_MODE: Final = 0o644


def why_not_ready_file(path: Path) -> str | None:
    """Why the file cannot be written once the process serves, found out before it does; None when it can."""
    folder = path.parent
    if path.is_dir():
        return f"{path} is a folder: name a file"
    if not folder.is_dir():
        return f"there is no folder {folder} for {path.name}: make it, or name another file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"files may not be made in the folder {folder}: name another file"
    return None


def write_ready_file(path: Path, address: str, **identity: str) -> None:
    """Whole or not there: whoever waits for it never reads half. Raises OSError."""
    with output_file(path, _MODE) as file:
        file.write(json.dumps({"address": address, "pid": os.getpid()} | identity).encode())


def why_not_written(path: Path, error: OSError) -> str:
    """The sentence about a `write_ready_file` that failed."""
    said = f"the ready file {path} cannot be written: {(error.strerror or str(error)).lower()}"
    if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
        return said
    return f"{said}, its disk has {shutil.disk_usage(path.parent).free} bytes free: make room there"
