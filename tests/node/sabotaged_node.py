"""A node with a store or an engine that misbehaves on command: a stand-in for what cannot be had without root or a bug.

What happens is said by the file that KVFERRY_TEST_SABOTAGE names, word by word, for as long as it says so:
`restore`, `publish`, `reap` (a store call does not return, as on a hung NFS mount), `load` (nor does the self-test
before it serves), `hang` (nor the engine's step), `fail` (it raises), `fsync:28` (that call of the store's file system
fails with that error number).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.client.cli import main
from kvferry.engine.engine import Engine
from kvferry.node import loading
from kvferry.store.fs import FileSystem, PosixFileSystem
from kvferry.store.snapshot_store import SnapshotStore

FILE_SYSTEM_CALLS = sorted(name for name, it in vars(FileSystem).items() if name[0] != "_" and callable(it))
ORDERS = Path(os.environ["KVFERRY_TEST_SABOTAGE"])


def is_ordered(word: str) -> bool:
    """Whether the file says so now."""
    try:
        return word in ORDERS.read_text().split()
    except FileNotFoundError:
        return False


def sabotaged(real: Callable[..., Any], blocked_by: str, failed_by: str) -> Callable[..., Any]:
    """A method that blocks or raises on command."""

    def method(*args: Any, **kwargs: Any) -> Any:
        while is_ordered(blocked_by):
            time.sleep(0.02)
        if is_ordered(failed_by):
            raise RuntimeError("sabotaged")
        return real(*args, **kwargs)

    return method


for name in ("restore_usable", "publish", "reap"):
    order = name.partition("_")[0]
    setattr(SnapshotStore, name, sabotaged(getattr(SnapshotStore, name), order, "never"))


def refusing(call: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the operating system that fails on command."""

    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            orders = ORDERS.read_text().split()
        except FileNotFoundError:
            orders = []
        for order in orders:
            if order.startswith(f"{call}:"):
                number = int(order.rpartition(":")[2])
                raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return method


for name in FILE_SYSTEM_CALLS:
    setattr(PosixFileSystem, name, refusing(name, getattr(PosixFileSystem, name)))
loading.self_test = sabotaged(loading.self_test, "load", "never")
Engine.forward = sabotaged(Engine.forward, "hang", "fail")  # type: ignore[method-assign]

main()
