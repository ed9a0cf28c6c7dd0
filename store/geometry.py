"""What the rows of a model look like, and who gives and takes them. All that the store knows of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of a model's K and V rows; block_size is in positions."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_size: int = 32

    @property
    def kv_dim(self) -> int:
        """Values in one K row (and in one V row): all KV heads, head-major."""
        return self.n_kv_heads * self.head_dim


class RowSource(Protocol):
    """Gives rows that do not change while a snapshot of them is written."""

    def read_rows(self, layer: int, start: int, stop: int, k_out: Rows, v_out: Rows) -> None:
        """Copies rows start..stop-1 of a layer into k_out and v_out, float32 [stop - start, kv_dim]."""


class RowSink(Protocol):
    """Takes restored rows; nothing counts until whoever asked for the restore says so."""

    def write_rows(self, layer: int, start: int, k: Rows, v: Rows) -> None:
        """Takes rows start..start+n-1 of a layer, float32 [n, kv_dim]; k and v are reused after the call, so copy."""
