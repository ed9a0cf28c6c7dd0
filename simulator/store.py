"""The shared snapshot store of a simulated cluster: what is there, how slow it is, and how it lies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvferry.coordinator.registry import TokenArray
from kvferry.coordinator.snapshots import WhichStore
from kvferry.store.geometry import KvGeometry
from kvferry.store.lcp_index import LcpIndex
from kvferry.store.vlkv3 import ContentSpan


class SimulatedStore:
    """Snapshots are their tokens. A coordinator sees them through ``StoreView``, which grows old."""

    def __init__(self, rng: random.Random, sometimes: Counter[str]) -> None:
        self.seconds_per_row = 0.0002
        # A read finds a file handle that went stale, or another prefix's file under a name that collides.
        self.stale_chance = 0.0
        self.collision_chance = 0.0
        self._rng = rng
        self._sometimes = sometimes
        self.index = LcpIndex()
        self._n_published = 0

    def publish(self, token_ids: Sequence[int]) -> str:
        """Returns its name."""
        self._n_published += 1
        name = f"kv_{self._n_published:06}"
        self.index.add(name, np.array(token_ids, dtype=np.int32))
        return name

    def evict_some(self) -> None:
        for name in list(self.index):
            if self._rng.random() < 0.7:
                self.index.remove(name)

    def find(self, token_ids: TokenArray) -> int:
        """Rows that a node may really restore, after it compared the tokens."""
        if self._rng.random() < self.collision_chance:
            self._sometimes["FNV collision"] += 1
            return 0  # the name matched, the tokens did not: not used
        if self._rng.random() < self.stale_chance:
            self._sometimes["ESTALE"] += 1
            return 0
        match = self.index.find(token_ids)
        return 0 if match is None else min(match.n_common, len(token_ids) - 1)


class StoreView:
    """A coordinator's index: what was announced, until it looks at the directory again."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store
        self._known = LcpIndex()
        self._fingerprints: list[str] = []
        self.refresh()

    def refresh(self) -> None:
        self._known = LcpIndex()
        for name in self._store.index:
            self._known.add(name, self._store.index.token_ids(name))

    def which_store(self) -> WhichStore:
        return WhichStore("the only one")

    def watch(self, fingerprint: str, geometry: KvGeometry, vocab_size: int) -> None:
        del geometry, vocab_size
        if fingerprint not in self._fingerprints:
            self._fingerprints.append(fingerprint)

    def announce(self, fingerprint: str, names: Sequence[str], namespace: str = "") -> None:
        del fingerprint, namespace
        for name in names:
            if name in self._store.index:
                self._known.add(name, self._store.index.token_ids(name))

    def longest_prefixes(
        self, token_ids: TokenArray, spans: Sequence[ContentSpan] = (), namespace: str = ""
    ) -> dict[str, int]:
        del spans, namespace  # simulated clients send no pictures, and are one tenant
        match = self._known.find(token_ids)
        if match is None:
            return {}
        n_common = min(match.n_common, len(token_ids) - 1)
        return dict.fromkeys(self._fingerprints, n_common)
