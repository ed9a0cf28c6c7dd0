"""Which store a root is: an id in a file, so that two processes can tell whether they mean the same one.

Paths cannot tell (one mount has many names) and neither can device numbers (every host has its own). Whoever opens the
store first writes the id; nobody ever replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvferry.store.errors import SnapshotGone, SnapshotRejected, os_errors_mapped
from kvferry.store.fs import FileSystem
from kvferry.store.publish import create_temp, publish
from kvferry.store.reader import open_regular

STORE_ID_FILE: Final = "store-id"

_ID: Final = re.compile(rb"[0-9a-f]{32}")
_ID_BYTES: Final = 32


def read_store_id(fs: FileSystem, root: Path) -> str:
    """The store's id, 32 hex digits; empty when it has none yet. Raises StoreUnavailable."""
    path = root / STORE_ID_FILE
    content = memoryview(bytearray(_ID_BYTES))
    try:
        with open_regular(fs, path) as (fd, _), os_errors_mapped("read", path):
            n_read = fs.preadv(fd, [content], 0)
    except (SnapshotGone, SnapshotRejected):
        return ""
    found = content[:n_read].tobytes()
    return found.decode() if _ID.fullmatch(found) else ""


def ensure_store_id(fs: FileSystem, root: Path, unique: Callable[[], str]) -> str:
    """The store's id, made when there is none: of several that make one at the same time, the first one's stays.

    ``unique`` gives 32 hex digits. Raises StoreFull, StoreUnavailable, NameTaken.
    """
    if found := read_store_id(fs, root):
        return found
    with os_errors_mapped("make directory", root):
        fs.make_directories(str(root))
    fresh = unique()
    with create_temp(fs, root / f"{STORE_ID_FILE}.{unique()}.tmp") as temp:
        temp.write([memoryview(fresh.encode())])
        publish(fs, temp.path, root / STORE_ID_FILE, temp.finish(_ID_BYTES), confirm=lambda: None)
    return read_store_id(fs, root)
