"""Rows on their way between the engine's cache and the store: each piece shows that the call gets on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvPool, KvSequence, Planes
from kvferry.node.messages import RestoreRequest
from kvferry.node.sequence_rows import SequenceRows


class RestoreAbandoned(Exception):
    """Raised into a restore that nobody waits for any more."""


class StagedRows(SequenceRows):
    """A sequence's rows that show progress, and stop when nobody waits for them any more."""

    def __init__(
        self,
        pool: KvPool | None,
        sequence: KvSequence,
        tell: Callable[[], None],
        request: RestoreRequest | None = None,
        n_rows: int = 0,
    ) -> None:
        super().__init__(pool, sequence, n_rows)
        self._tell = tell
        self._request = request

    def write_rows(self, layer: int, start: int, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """Stage rows start.. of a layer, float32 [n, kv_dim]."""
        self._gets_on()
        super().write_rows(layer, start, k, v)

    def read_rows(
        self, layer: int, start: int, stop: int, k_out: NDArray[np.float32], v_out: NDArray[np.float32]
    ) -> None:
        """Copy rows start..stop-1 of a layer out, float32 [stop - start, kv_dim]."""
        super().read_rows(layer, start, stop, k_out, v_out)
        self._gets_on()

    def write_planes(self, layer: int, start: int, planes: Planes) -> None:
        """Stage rows start.. of a layer, as the cache holds them."""
        self._gets_on()
        super().write_planes(layer, start, planes)

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """Copy rows start..stop-1 of a layer out, as the cache holds them."""
        super().read_planes(layer, start, stop, planes)
        self._gets_on()

    def tile_buffers(self, layer: int, first_block: int, n_blocks: int) -> list[memoryview] | None:
        """Where the blocks lie; asked for every few MiB."""
        self._gets_on()
        return super().tile_buffers(layer, first_block, n_blocks)

    def read_tiles_in_place(
        self, fd: int, offset: int, layer: int, first_block: int, n_blocks: int, digests: memoryview
    ) -> bool:
        """Read tiles of a layer from a file; as often as ``tile_buffers`` would be asked."""
        self._gets_on()
        return super().read_tiles_in_place(fd, offset, layer, first_block, n_blocks, digests)

    def read_rows_in_place(self, fd: int, offset: int, layer: int, start: int, n_rows: int, block_size: int) -> bool:
        """The same for rows of version 1."""
        self._gets_on()
        return super().read_rows_in_place(fd, offset, layer, start, n_rows, block_size)

    def _gets_on(self) -> None:
        if self._request is not None and self._request.abandoned:
            raise RestoreAbandoned
        self._tell()
