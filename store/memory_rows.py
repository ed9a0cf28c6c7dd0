"""Rows in plain arrays: where a dump collects them, and what tests and drills publish."""

from __future__ import annotations

import numpy as np

from kvferry.store.geometry import KvGeometry, Rows


class MemoryRows:
    """A source and a sink of rows: k and v, float32 [layers, n, kv_dim]. Not thread-safe."""

    def __init__(self, k: Rows, v: Rows) -> None:
        self.k = k
        self.v = v

    @classmethod
    def empty(cls, geometry: KvGeometry, n_rows: int) -> MemoryRows:
        """Room for n_rows, not yet filled."""
        shape = (geometry.n_layers, n_rows, geometry.kv_dim)
        return cls(np.empty(shape, np.float32), np.empty(shape, np.float32))

    def read_rows(self, layer: int, start: int, stop: int, k_out: Rows, v_out: Rows) -> None:
        """Copies rows start..stop-1 of a layer out."""
        k_out[:] = self.k[layer, start:stop]
        v_out[:] = self.v[layer, start:stop]

    def write_rows(self, layer: int, start: int, k: Rows, v: Rows) -> None:
        """Takes rows start..start+n-1 of a layer."""
        self.k[layer, start : start + len(k)] = k
        self.v[layer, start : start + len(v)] = v
