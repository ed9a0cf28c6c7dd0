"""What a store asks of an object store, and one in memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object that is there. ``tag`` changes whenever it is replaced."""

    n_bytes: int
    modified_ns: int
    tag: str


class Objects(Protocol):
    """Keys and bytes. Raises FileNotFoundError, FileExistsError, OSError(ESTALE) when an object was replaced meanwhile,
    OSError for the rest."""

    def put_new(self, key: str, data: BinaryIO, n_bytes: int) -> None:
        """Creates an object; never replaces one with other content. Whole or not at all."""

    def head(self, key: str) -> ObjectFacts:
        """What is there."""

    def get(self, key: str, start: int, stop: int, tag: str) -> bytes | memoryview:
        """Bytes start..stop-1 of the object with that tag."""

    def names(self, prefix: str) -> list[str]:
        """Names directly below a prefix: objects, and what has objects below it."""

    def copy(self, source: str, target: str) -> None:
        """Copies on the server's side; may replace."""

    def delete(self, key: str) -> None:
        """Removes an object that is there."""


class MemoryObjects:
    """Objects in a dictionary; several stores may share one. Thread-safe."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectFacts]] = {}
        self._tags = itertools.count(1)

    def put_new(self, key: str, data: BinaryIO, n_bytes: int) -> None:
        content = data.read(n_bytes)
        with self._lock:
            if key in self._objects:
                raise FileExistsError(17, "File exists", key)
            self._put(key, content)

    def _put(self, key: str, content: bytes) -> None:
        self._objects[key] = content, ObjectFacts(len(content), self._now_ns(), str(next(self._tags)))

    def head(self, key: str) -> ObjectFacts:
        return self._there(key)[1]

    def get(self, key: str, start: int, stop: int, tag: str) -> bytes | memoryview:
        content, facts = self._there(key)
        if facts.tag != tag:
            raise OSError(116, "Stale file handle", key)
        return memoryview(content)[start:stop]

    def names(self, prefix: str) -> list[str]:
        with self._lock:
            below = [key.removeprefix(prefix) for key in self._objects if key.startswith(prefix)]
        return sorted({Path(key).parts[0] for key in below})

    def copy(self, source: str, target: str) -> None:
        content, _ = self._there(source)
        with self._lock:
            self._put(target, content)

    def delete(self, key: str) -> None:
        with self._lock:
            if self._objects.pop(key, None) is None:
                raise FileNotFoundError(2, "No such file or directory", key)

    def _there(self, key: str) -> tuple[bytes, ObjectFacts]:
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise FileNotFoundError(2, "No such file or directory", key)
        return found
