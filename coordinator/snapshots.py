"""What the shared snapshot store could restore, for routing: an index in memory, kept up by a thread that may hang.

Only ``longest_prefixes`` is on the way of a turn, and it does no I/O. Everything that touches the store's disk is the
thread's: if the store hangs, the index grows old and turns go on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np

from kvferry.coordinator.errors import StorePathInvalid
from kvferry.coordinator.registry import TokenArray
from kvferry.store.errors import StoreError, StoreMisuse
from kvferry.store.geometry import KvGeometry
from kvferry.store.identity import read_store_id
from kvferry.store.place import StorePlace
from kvferry.store.reader import Identity
from kvferry.store.seals import describe
from kvferry.store.snapshot_store import SnapshotStore
from kvferry.store.vlkv3 import ContentSpan

logger = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 30.0
"""Nodes announce what they publish; the look at the directory finds what was missed and what was evicted."""

MAX_WAITING_JOBS: Final = 1_024
"""While the store hangs, announcements beyond this are dropped: the next look at the directory finds those files."""


MAX_TENANTS: Final = 256
"""Namespaces whose index is in memory, the most recently used: another one is read when one of its turns comes."""

Key = tuple[str, str]
"""A fingerprint, and a tenant's namespace or nothing."""

LOOK_SECONDS: Final = 1.0
"""A mount that hangs is no reason not to start; a local stat takes microseconds, one over a LAN a millisecond."""


def check_store(place: StorePlace | None) -> None:
    """Raises StorePathInvalid when something is there that is not a folder, or for a key that cannot be used."""
    if place is None:
        return
    try:
        place.open()
    except StoreMisuse as e:
        raise StorePathInvalid(str(e)) from e
    root = place.folder
    if root is None:
        return
    found: list[bool] = []
    looking = threading.Thread(target=lambda: found.append(root.exists() and not root.is_dir()), daemon=True)
    looking.start()
    looking.join(LOOK_SECONDS)
    if any(found):
        raise StorePathInvalid(f"the store path {root} is not a folder: give the snapshot folder that the nodes share")


@dataclass(frozen=True, slots=True)
class WhichStore:
    """A store's id, and how its files are sealed (store.seals.describe); each empty while it is not known."""

    store_id: str = ""
    seal: str = ""


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """What is known of one model's files of one namespace. ``files``: their size and last use, as of the last look."""

    fingerprint: str
    namespace: str
    store: SnapshotStore
    files: Mapping[str, Identity]


class StoredPrefixes(Protocol):
    """What routing asks of a store, without I/O."""

    def longest_prefixes(
        self, token_ids: TokenArray, spans: Sequence[ContentSpan] = (), namespace: str = ""
    ) -> dict[str, int]:
        """fingerprint → leading tokens, of n at most n - 1, that the store holds rows of; spans are its pictures."""


class SnapshotNews(Protocol):
    """What nodes tell about a store."""

    def which_store(self) -> WhichStore:
        """What is known of the store that is looked at."""

    def watch(self, fingerprint: str, geometry: KvGeometry, vocab_size: int) -> None:
        """A node with this fingerprint is in the fleet."""

    def announce(self, fingerprint: str, names: Sequence[str], namespace: str = "") -> None:
        """A node published these."""


class SnapshotView:
    """The store's index by fingerprint and namespace. Used from the event loop; a thread of its own does the I/O.

    The thread is a daemon and nobody waits for it, since a hung NFS call cannot be interrupted.
    """

    def __init__(self, place: StorePlace | None) -> None:
        """Raises StoreMisuse for a place that cannot be opened."""
        self._opened = None if place is None else place.open()
        self._shapes: dict[str, tuple[KvGeometry, int]] = {}  # fingerprint → geometry, vocabulary size
        self._stores: OrderedDict[Key, SnapshotStore] = OrderedDict()  # the least recently used first
        self._files: dict[Key, dict[str, Identity]] = {}  # by name, of files in the index
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING_JOBS)
        self._thread: threading.Thread | None = None
        self._store_id = ""
        self._identifying = False

    def start(self) -> None:
        if self._opened is not None:
            self._thread = threading.Thread(target=self._work, name="snapshot-index", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end; does not wait for it."""
        self._submit(None)

    def watch(self, fingerprint: str, geometry: KvGeometry, vocab_size: int) -> None:
        """A node with this fingerprint is in the fleet."""
        if fingerprint not in self._shapes:
            self._shapes[fingerprint] = geometry, vocab_size
            if self._store(fingerprint) is None:
                del self._shapes[fingerprint]

    def announce(self, fingerprint: str, names: Sequence[str], namespace: str = "") -> None:
        """A node published these."""
        if (store := self._store(fingerprint, namespace)) is not None:
            for name in names:
                self._submit(partial(self._take_in, (fingerprint, namespace), store, name))

    def remove(self, token_ids: TokenArray, spans: Sequence[ContentSpan], n_shared: int, namespace: str) -> None:
        """Delete, before long, what only a conversation of these tokens needs; see ``SnapshotStore.remove``.

        Snapshots of fingerprints that no node has had since the start are left to eviction.
        """
        for fingerprint in self._shapes:
            if (store := self._store(fingerprint, namespace)) is not None:
                self._submit(partial(self._remove, (fingerprint, namespace), store, token_ids, spans, n_shared))

    def _remove(
        self, key: Key, store: SnapshotStore, token_ids: TokenArray, spans: Sequence[ContentSpan], n_shared: int
    ) -> None:
        try:
            gone = store.remove(token_ids, spans, n_shared)
        except StoreError as e:
            logger.warning("the snapshots of a deleted session are left to eviction: %s", e)
            return
        files = self._files.get(key, {})
        for name in gone:
            files.pop(name, None)
        logger.info("%d snapshots of a deleted session are removed", len(gone))

    def _store(self, fingerprint: str, namespace: str = "") -> SnapshotStore | None:
        """What is known of a namespace; at first nothing, until the thread has looked."""
        key = fingerprint, namespace
        if key in self._stores:
            self._stores.move_to_end(key)
            return self._stores[key]
        if self._opened is None or fingerprint not in self._shapes:
            return None
        fs, root, seal = self._opened
        geometry, vocab_size = self._shapes[fingerprint]
        try:
            store = SnapshotStore.index_only(
                root, fingerprint, geometry, vocab_size, fs=fs, seal=seal, tenant=namespace, removes=True
            )
        except StoreError as e:
            logger.warning("snapshots of fingerprint %s are not used for routing: %s", fingerprint, e)
            return None
        self._stores[key] = store
        self._forget_tenants()
        self._submit(partial(self._refresh, key, store))
        return store

    def _forget_tenants(self) -> None:
        of_tenants = [key for key in self._stores if key[1]]
        for key in of_tenants[: max(0, len(of_tenants) - MAX_TENANTS)]:
            del self._stores[key]
            self._files.pop(key, None)

    def which_store(self) -> WhichStore:
        """The store that is looked at; its id is empty until the thread has found one, which it then tries to."""
        if self._opened is None:
            return WhichStore()
        if not self._store_id and not self._identifying:
            self._identifying = True
            if not self._submit(self._identify):
                self._identifying = False
        return WhichStore(self._store_id, describe(self._opened[2]))

    def longest_prefixes(
        self, token_ids: Sequence[int] | TokenArray, spans: Sequence[ContentSpan] = (), namespace: str = ""
    ) -> dict[str, int]:
        """fingerprint → leading tokens that the store holds rows of; of n tokens at most n - 1 are of use."""
        ids = np.asarray(token_ids, dtype=np.int32)
        stores = {fingerprint: self._store(fingerprint, namespace) for fingerprint in self._shapes}
        matches = {f: store.find(ids, spans=spans) for f, store in stores.items() if store is not None}
        return {f: min(match.n_common, len(ids) - 1) for f, match in matches.items() if match is not None}

    @property
    def n_snapshots(self) -> int:
        return sum(store.statistics().n_known for store in self._stores.values())

    @property
    def n_bytes(self) -> int:
        """Of the snapshots that may be used: a refused file is not one."""
        return sum(file.n_bytes for files in list(self._files.values()) for file in list(files.values()))

    def indexes(self) -> list[StoreIndex]:
        """All that is known of the store, in an order that does not change."""
        return [StoreIndex(*key, self._stores[key], self._files.get(key, {})) for key in sorted(self._stores)]

    def _submit(self, job: Callable[[], None] | None) -> bool:
        """Whether it will be done."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            logger.warning("the snapshot store hangs: %d announcements wait", MAX_WAITING_JOBS)
            return False
        return True

    def _work(self) -> None:
        """Jobs as they come, and a look at the directory when it is time, however many jobs there are."""
        look_at_s = time.monotonic() + REFRESH_SECONDS
        while True:
            if (left_s := look_at_s - time.monotonic()) <= 0:
                for key, store in list(self._stores.items()):
                    self._refresh(key, store)
                look_at_s = time.monotonic() + REFRESH_SECONDS
                continue
            try:
                job = self._jobs.get(timeout=left_s)
            except queue.Empty:
                continue
            if job is None:
                return
            job()

    def _identify(self) -> None:
        try:
            if self._opened is not None:
                self._store_id = read_store_id(self._opened[0], self._opened[1])
        except StoreError as e:
            logger.warning("the snapshot store cannot be read, routing goes on without news of it: %s", e)
        self._identifying = False

    def _refresh(self, key: Key, store: SnapshotStore) -> None:
        try:
            store.refresh()
            files = store.files()
            if key in self._stores:  # not forgotten meanwhile
                self._files[key] = files
        except StoreError as e:
            logger.warning("the snapshot store cannot be listed, routing goes on without news of it: %s", e)

    def _take_in(self, key: Key, store: SnapshotStore, name: str) -> None:
        """One announced snapshot; after a failure the next look at the directory finds it."""
        try:
            if store.announce(name) and (file := store.file(name)) is not None:
                self._files.setdefault(key, {})[name] = file
        except StoreError as e:
            logger.warning("announced snapshot %s is not used: %s", name, e)
