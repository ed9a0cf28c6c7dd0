"""Weights by name as float32, kept while they fit into a budget."""

from __future__ import annotations

from typing import Final

from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.reference.layers import F32

WEIGHTS_BYTES_MAX: Final = 4 << 30


class Weights:
    """Reads tensors of a model file. Those that fit into ``n_bytes_max`` are read once, the others each time."""

    def __init__(self, file: ModelFile, prefix: str = "", n_bytes_max: int = WEIGHTS_BYTES_MAX) -> None:
        self._file = file
        self._prefix = prefix
        self._kept: dict[str, F32] = {}
        self._n_bytes_left = [n_bytes_max]  # shared with the parts

    def part(self, prefix: str) -> Weights:
        """The tensors whose names begin so, by the rest of their names; of the same budget."""
        part = Weights(self._file, self._prefix + prefix)
        part._kept, part._n_bytes_left = self._kept, self._n_bytes_left
        return part

    def matrix(self, name: str) -> F32:
        """A tensor as float32 [rows, cols]."""
        name = self._prefix + name
        if name in self._kept:
            return self._kept[name]
        rows = self._file.tensors[name].read()
        if rows.nbytes <= self._n_bytes_left[0]:
            self._n_bytes_left[0] -= rows.nbytes
            self._kept[name] = rows
        return rows

    def vector(self, name: str) -> F32:
        row: F32 = self.matrix(name)[0]
        return row

    def linear(self, x: F32, name: str) -> F32:
        """x [n, cols] through a matrix [rows, cols], plus its bias if it has one."""
        y: F32 = x @ self.matrix(name).T
        if f"{self._prefix}{name}_bias" in self._file.tensors:
            y += self.vector(f"{name}_bias")
        return y
