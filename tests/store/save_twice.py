"""Saves 40, then 80 tokens of one sequence: `save_twice.py ROOT VERSION`. After each it looks for ROOT/told-N."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

root = Path(sys.argv[1])
rows = MemoryRows.empty(KvGeometry(2, 2, 4), 80)
rows.k[:] = np.arange(80)[None, :, None]
rows.v[:] = -rows.k
store = SnapshotStore(
    root, "feed", KvGeometry(2, 2, 4), 1024, 1 << 20, 10, "node-1", version=3 if sys.argv[2] == "3" else 1
)
store.reap()
for n in (40, 80):
    store.publish(np.arange(1, 81)[:n], rows)
    (root / f"told-{n}").exists()
