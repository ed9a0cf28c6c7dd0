"""A node that saves until told to end: `save_many.py ROOT TENANT NODE BUDGET N_LEAST STOP`. Prints counts as JSON.

It ends when there is a file STOP and it has saved N_LEAST times, which takes a slow disk longer than a fast one. It
goes on from one conversation of its own again and again, and saves others, in two turns each, that nobody asks for any
more: those are an hour old at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvferry.store.errors import SnapshotGone, StoreFull
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.seals import KeyedSeal
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(2, 2, 16)
N = 40
HOT = 7
PATIENCE_S = 120.0


def rows_of(first: int, n: int) -> MemoryRows:
    rows = MemoryRows.empty(GEOMETRY, n)
    rows.k[:] = first
    rows.v[:] = -first
    return rows


def main(root: Path, tenant: str, node: str, budget: int, n_least: int, stop: Path) -> None:
    counts = {"n_saved": 0, "n_without_room": 0, "n_lost": 0, "n_wrong": 0}
    store = SnapshotStore(
        root, "feed", GEOMETRY, 1 << 20, budget, 1000, node, version=3, tenant=tenant, seal=KeyedSeal(bytes(32))
    )
    store.reap()
    hot = np.arange(HOT, HOT + N)
    store.publish(hot, rows_of(HOT, N))
    ends_at = time.monotonic() + PATIENCE_S  # whatever became of who started it
    first = 1000
    while not (stop.exists() and counts["n_saved"] >= n_least) and time.monotonic() < ends_at:
        first += 1
        names: list[str] = []
        for n in (N, 2 * N):
            try:
                names.append(store.publish(np.arange(first, first + n), rows_of(first, n)).name)
            except StoreFull:
                counts["n_without_room"] += 1
                continue
            counts["n_saved"] += 1
            for name in names:  # the second turn marks the first one's as used
                with suppress(FileNotFoundError):  # evicted for another node already
                    os.utime(store.path / name, (time.time() - 3600,) * 2)
        rows = MemoryRows.empty(GEOMETRY, N)
        match = store.find(hot)
        try:
            if match is None or match.n_common < N:
                counts["n_lost"] += 1
                store.publish(hot, rows_of(HOT, N))
                continue
            store.restore(match, N, rows)
        except SnapshotGone:
            counts["n_lost"] += 1
        else:
            counts["n_wrong"] += int((rows.k != HOT).any() or (rows.v != -HOT).any())
    print(json.dumps({**counts, "n_evicted": store.statistics().n_evicted}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6]))
