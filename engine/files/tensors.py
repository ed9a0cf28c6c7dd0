"""One weight tensor of a model file, wherever it came from: read as float32 rows, a range at a time.

All read from a map of the file: nothing is held, and a range of rows touches only the pages it lies on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import N_CHANNELS
from kvferry.engine.files.dequantize import KINDS, dequantize

_F32 = NDArray[np.float32]
_U8 = NDArray[np.uint8]


class Tensor(Protocol):
    """``shape``: (rows, cols) = (out_features, in_features); a vector has one row. ``kind``: the stored format."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def kind(self) -> str: ...

    def read(self, start: int = 0, stop: int | None = None) -> _F32:
        """Rows [start, stop) as float32 [n, cols], an array of the caller's own."""
        ...

    def stored(self, start: int = 0, stop: int | None = None) -> _U8 | None:
        """The same rows as they are stored: uint8 [n, bytes of a row]; None when the file does not hold them as rows.

        A row is whole blocks of ``kind``. May be a read-only view of the file.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows that lie in the file as rows. ``data``: uint8 [rows, bytes of a row]."""

    shape: tuple[int, int]
    kind: str
    data: _U8

    def read(self, start: int = 0, stop: int | None = None) -> _F32:
        return _own(dequantize(self.kind, self.data[start:stop]))

    def stored(self, start: int = 0, stop: int | None = None) -> _U8 | None:
        return self.data[start:stop]


@dataclass(frozen=True, slots=True)
class PairedRows:
    """Rows of heads that lie in the file as rope pairs (2i, 2i + 1), given as pairs (i, i + head_dim / 2)."""

    shape: tuple[int, int]
    kind: str
    data: _U8
    head_dim: int

    def read(self, start: int = 0, stop: int | None = None) -> _F32:
        return _own(dequantize(self.kind, self._rows(start, stop)))

    def stored(self, start: int = 0, stop: int | None = None) -> _U8 | None:
        return self._rows(start, stop)

    def _rows(self, start: int, stop: int | None) -> _U8:
        row = np.arange(self.shape[0])[start:stop]
        in_head = row % self.head_dim
        half = self.head_dim // 2
        rows: _U8 = self.data[row - in_head + in_head % half * 2 + in_head // half]
        return rows


@dataclass(frozen=True, slots=True)
class Columns:
    """A matrix that the file holds transposed: row r is column ``first_column + r``. ``data``: [cols, stored columns].

    ``data`` has elements of 2 bytes (uint16) or 4 (uint32), by ``kind``.
    """

    shape: tuple[int, int]
    kind: str
    data: NDArray[np.uint16] | NDArray[np.uint32]
    first_column: int

    def read(self, start: int = 0, stop: int | None = None) -> _F32:
        first, last, _ = slice(start, stop).indices(self.shape[0])
        columns = np.ascontiguousarray(self.data[:, self.first_column + first : self.first_column + last].T)
        return _own(dequantize(self.kind, columns.view(np.uint8)))

    def stored(self, start: int = 0, stop: int | None = None) -> _U8 | None:  # noqa: ARG002  # the protocol's
        return None


@dataclass(frozen=True, slots=True)
class FramePatches:
    """A patch embedding held as one tensor for each frame, given as rows of (channel, frame, row, column)."""

    shape: tuple[int, int]
    kind: str
    frames: tuple[Tensor, ...]

    def read(self, start: int = 0, stop: int | None = None) -> _F32:
        frames = [frame.read(start, stop) for frame in self.frames]
        apart = [rows.reshape(len(rows), N_CHANNELS, 1, -1) for rows in frames]
        return np.concatenate(apart, axis=2).reshape(len(frames[0]), -1)

    def stored(self, start: int = 0, stop: int | None = None) -> _U8 | None:  # noqa: ARG002  # the protocol's
        return None


def row_bytes(kind: str, n_cols: int) -> int:
    """Bytes of one row. KeyError for an unknown kind."""
    block_bytes, _ = KINDS[kind]
    elements = {"f32": 1, "f16": 1, "bf16": 1}.get(kind) or (256 if kind.endswith("_k") else 32)
    return n_cols // elements * block_bytes


def _own(rows: _F32) -> _F32:
    """A view of the file becomes a copy: what was read stays when the file's pages are dropped."""
    return rows if rows.flags.owndata and rows.flags.writeable else rows.copy()
