"""Rows of a q8 cache as they lie in version 2 files: int8 values and one float32 scale per head and row, verbatim.

Nothing here quantises for a live cache: what the attention reads is what is written, so a restore gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.store import vlkv
from kvferry.store.errors import SnapshotRejected
from kvferry.store.geometry import KvGeometry, Rows

Values = NDArray[np.int8]
Scales = NDArray[np.float32]

# Records read or written at once; with the widest rows in use (kv_dim 1,024) this is 4 MiB.
RECORDS_PER_CALL: Final = 2048


class Q8Sink(Protocol):
    """Takes restored q8 rows; nothing counts until whoever asked says so."""

    def write_q8(self, layer: int, start: int, k: Values, v: Values, k_scale: Scales, v_scale: Scales) -> None:
        """Rows start..start+n-1 of a layer: k, v int8 [n, kv_dim], scales float32 [n, nkv]; copy, they are reused."""


class Q8Source(Protocol):
    """Gives q8 rows that do not change while they are written."""

    def read_q8(
        self, layer: int, start: int, stop: int, k: Values, v: Values, k_scale: Scales, v_scale: Scales
    ) -> None:
        """Copies rows start..stop-1 of a layer out, shapes as above."""


@dataclass(frozen=True, slots=True, eq=False)
class Q8Rows:
    """Whole q8 rows in memory: k, v int8 [layers, n, kv_dim]; k_scale, v_scale float32 [layers, n, nkv]."""

    k: Values
    v: Values
    k_scale: Scales
    v_scale: Scales

    @classmethod
    def empty(cls, geometry: KvGeometry, n_rows: int) -> Q8Rows:
        """Room for n_rows, not yet filled."""
        values, scales = (
            (geometry.n_layers, n_rows, geometry.kv_dim),
            (geometry.n_layers, n_rows, geometry.n_kv_heads),
        )
        return cls(
            np.empty(values, np.int8), np.empty(values, np.int8), np.empty(scales, "<f4"), np.empty(scales, "<f4")
        )

    def write_q8(self, layer: int, start: int, k: Values, v: Values, k_scale: Scales, v_scale: Scales) -> None:
        """Takes rows of a layer."""
        rows = slice(start, start + len(k))
        self.k[layer, rows], self.v[layer, rows] = k, v
        self.k_scale[layer, rows], self.v_scale[layer, rows] = k_scale, v_scale

    def read_q8(
        self, layer: int, start: int, stop: int, k: Values, v: Values, k_scale: Scales, v_scale: Scales
    ) -> None:
        """Copies rows of a layer out."""
        k[:], v[:] = self.k[layer, start:stop], self.v[layer, start:stop]
        k_scale[:], v_scale[:] = self.k_scale[layer, start:stop], self.v_scale[layer, start:stop]


class Q8Records:
    """A reused run of version 2 records: one buffer, and its four columns. One per thread."""

    def __init__(self, geometry: KvGeometry, n_records: int = RECORDS_PER_CALL) -> None:
        dtype = np.dtype(
            [
                ("k", "i1", (geometry.kv_dim,)),
                ("v", "i1", (geometry.kv_dim,)),
                ("k_scale", "<f4", (geometry.n_kv_heads,)),
                ("v_scale", "<f4", (geometry.n_kv_heads,)),
            ]
        )
        assert dtype.itemsize == vlkv.q8_record_bytes(geometry)  # noqa: S101 -- the format's record has no gaps
        self.n_records = n_records
        self.array: NDArray[Any] = np.empty(n_records, dtype)

    def bytes(self, n_records: int) -> memoryview:
        """The buffer of the first n_records, to read into or to write."""
        return self.array[:n_records].view(np.uint8).data

    def columns(self, n_records: int) -> tuple[Values, Values, Scales, Scales]:
        """k, v, k_scale, v_scale of the first n_records: views."""
        part = self.array[:n_records]
        return part["k"], part["v"], part["k_scale"], part["v_scale"]


def check_scales(*scales: Scales) -> None:
    """A scale is absmax/127, so it is finite and not negative. Raises SnapshotRejected(bad_scale)."""
    for array in scales:
        if not (np.isfinite(array).all() and (array >= 0).all()):
            raise SnapshotRejected("bad_scale", "a scale is negative or not finite")


def dequantise(values: Values, scales: Scales) -> Rows:
    """Values x scale of their head: float32 [n, kv_dim], for a person to look at."""
    n_heads = scales.shape[-1]
    by_head = values.reshape(*values.shape[:-1], n_heads, -1).astype(np.float32)
    return (by_head * scales[..., None]).reshape(values.shape)


def quantise(rows: Rows, n_heads: int) -> tuple[Values, Scales]:
    """absmax/127 per head and row, rounded half to even: what a q8 cache does, for tests and for exchange."""
    by_head = rows.reshape(*rows.shape[:-1], n_heads, -1)
    scales = (np.abs(by_head).max(axis=-1) / np.float32(127)).astype(np.float32)
    steps = np.where(scales == 0, np.float32(1), scales)
    values = np.rint(by_head / steps[..., None]).astype(np.int8)
    return values.reshape(rows.shape), scales
