"""A node whose store blocks: a stand-in for a hung NFS mount, which cannot be had without root.

While the file named by KVFERRY_TEST_BLOCK exists, the store's `restore` and `publish` do not return, and `reap` (the
first call of all) neither when the file holds the word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.client.cli import main
from kvferry.store.snapshot_store import SnapshotStore

GATE = Path(os.environ["KVFERRY_TEST_BLOCK"])


def blocking(name: str) -> Callable[..., Any]:
    """The store's method behind the gate."""
    real = getattr(SnapshotStore, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        while GATE.exists() and (name != "reap" or "reap" in GATE.read_text()):
            time.sleep(0.02)
        return real(*args, **kwargs)

    return method


for method_name in ("restore", "publish", "reap"):
    setattr(SnapshotStore, method_name, blocking(method_name))

main()
