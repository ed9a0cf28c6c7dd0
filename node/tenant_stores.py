"""The store of each namespace: a folder of its own in the same place, with an index of its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvferry.store.errors import StoreError
from kvferry.store.snapshot_store import SnapshotStore
from kvferry.store.statistics import StoreStatistics

MAX_TENANTS: Final = 64
"""Namespaces whose index is in memory, the most recently used: another one is read when one of its turns comes."""


class TenantStores:
    """Opened when they are first asked for; that does no I/O. Any thread."""

    def __init__(self, open_store: Callable[[str], SnapshotStore]) -> None:
        """Opens the common one, whose namespace is empty. Raises StoreMisuse."""
        self.common = open_store("")
        self._open_store = open_store
        self._stores: OrderedDict[str, SnapshotStore] = OrderedDict()  # the least recently used first
        self._prepared: set[str] = set()
        self._lock = threading.Lock()  # never held during I/O

    def of(self, namespace: str) -> SnapshotStore:
        """To read from."""
        if not namespace:
            return self.common
        with self._lock:
            if namespace not in self._stores:
                self._stores[namespace] = self._open_store(namespace)
                self._forget_some()
            self._stores.move_to_end(namespace)
            return self._stores[namespace]

    def prepared(self, namespace: str) -> SnapshotStore:
        """To save to: what crashes left in its folder is gone, and there is one. Raises StoreUnavailable, StoreFull,
        which count as a save that failed.

        The common one is prepared by whoever starts the store.
        """
        store = self.of(namespace)
        if namespace and namespace not in self._prepared:
            try:
                store.reap()
            except StoreError as error:
                store.counts.add_failed_save(error)
                raise
            with self._lock:
                self._prepared.add(namespace)
        return store

    def unprepare(self) -> None:
        """The store failed and is back: folders may be gone."""
        with self._lock:
            self._prepared.clear()

    def all(self) -> list[SnapshotStore]:
        """Those in memory."""
        with self._lock:
            return [self.common, *self._stores.values()]

    def statistics(self) -> StoreStatistics:
        """Of those in memory together; does no I/O."""
        first, *others = (store.statistics() for store in self.all())
        return sum(others, first)

    def _forget_some(self) -> None:
        while len(self._stores) > MAX_TENANTS:
            namespace, _ = self._stores.popitem(last=False)
            self._prepared.discard(namespace)
