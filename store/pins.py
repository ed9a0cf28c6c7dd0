"""What this process reads, or is about to read: not to be evicted, whichever folder of the store it lies in."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvferry.store.errors import SnapshotGone


class Pins:
    """Files by their paths. Stores that one process opens in one place share this: each may evict from all folders.

    Any thread; no I/O.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[Path] = Counter()
        self._condemned: set[Path] = set()  # being evicted at this moment: may not be pinned any more

    @contextmanager
    def hold(self, paths: Sequence[Path]) -> Iterator[None]:
        """Keeps files from being evicted by this process. Raises SnapshotGone when that is happening already."""
        with self._lock:
            for path in paths:
                if path in self._condemned:
                    raise SnapshotGone("pin", path)
            self._held.update(paths)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(paths)
                self._held += Counter()  # drops what is not pinned any more

    @contextmanager
    def condemn(self, path: Path) -> Iterator[bool]:
        """For the time in which a file is evicted nobody may pin it. False when somebody has: then it stays."""
        with self._lock:
            free = path not in self._held
            if free:
                self._condemned.add(path)
        try:
            yield free
        finally:
            if free:
                with self._lock:
                    self._condemned.discard(path)

    def held(self) -> frozenset[Path]:
        """All that is pinned."""
        with self._lock:
            return frozenset(self._held)
