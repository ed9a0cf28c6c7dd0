"""A GGUF model file: its metadata, its tensors as maps of the file, and the model's shape."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.fields import Fields
from kvferry.engine.files.gguf_config import gguf_end_token_ids, read_gguf_config
from kvferry.engine.files.gguf_header import HeaderDamaged, TensorEntry, read_header
from kvferry.engine.files.model_file import map_file

# What somebody has open is not parsed again: a vocabulary takes a quarter of a second, and a start reads it four times.
# A file that is written to twice within the clock's grain may look the same; one this old cannot.
_SETTLED_NS: Final = 2_000_000_000
_open_files: WeakValueDictionary[tuple[Path, int, int, int, int], GgufFile] = WeakValueDictionary()
ROPE_DIVISORS_BYTES_MAX: Final = 4 * 512  # a half of the largest head


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. ``shape`` is (rows, cols) = (out_features, in_features); a vector has one row.

    ``kind`` is the block format's lower-case name ('f32', 'q4_1', 'q8_0', ...). ``data`` is uint8 [rows, bytes of a
    row], a read-only map of the file: a row is whole blocks, in the file's own byte layout.
    """

    name: str
    shape: tuple[int, int]
    kind: str
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """An opened file. Nothing but the header has been read; the tensors' pages are read when they are touched."""

    path: Path
    version: int
    metadata: Mapping[str, Any]  # nobody changes it: files that are open are shared
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return Fields(f"{self.path}: metadata", self.metadata).text("general.architecture")

    @cached_property
    def config(self) -> ModelConfig:
        """The model's shape; without the vision tower, which is in another file.

        Raises UnsupportedArchitecture for an architecture or a rope scaling that is not supported, ModelInvalid for
        metadata that is missing, of a wrong type, or in contradiction to the tensors.
        """
        embedding = self.tensors.get("token_embd.weight")
        vocab_size = None if embedding is None else embedding.shape[0]
        return read_gguf_config(self.path, self.metadata, self.tensors.keys(), vocab_size, self._rope_divisors())

    def _rope_divisors(self) -> tuple[float, ...] | None:
        tensor = self.tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        if tensor.kind != "f32" or tensor.data.size > ROPE_DIVISORS_BYTES_MAX:
            raise ModelInvalid(f"{self.path}: rope_freqs.weight is no row of a few float32 numbers")
        return tuple(np.ascontiguousarray(tensor.data).reshape(-1).view("<f4").astype(float).tolist())

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, the file's end-of-sequence token first."""
        return gguf_end_token_ids(self.path, self.metadata)


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF file and check its header against its size.

    Raises ModelNotFound when nothing is there, ModelInvalid when it is not a whole GGUF file, UnsupportedArchitecture
    for one part of a split one.
    """
    path = Path(path)
    if path.is_dir():
        raise ModelInvalid(f"{path} is a folder, not a GGUF file")
    key = _state(path)
    found = _open_files.get(key) if key is not None else None
    if found is not None:
        return found
    data = map_file(path)
    try:
        header = read_header(memoryview(data.data))
    except HeaderDamaged as error:
        raise ModelInvalid(f"{path} {error}") from error
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedArchitecture(
            f"{path} is one part of a model split over several files; join them with gguf-split first"
        )
    file = GgufFile(
        path, header.version, MappingProxyType(header.metadata), {e.name: _tensor(e, data) for e in header.tensors}
    )
    if key is not None:
        _open_files[key] = file
    return file


def _state(path: Path) -> tuple[Path, int, int, int, int] | None:
    try:
        stat = path.stat()
    except (OSError, ValueError):  # said by whoever reads it
        return None
    if time.time_ns() - stat.st_ctime_ns < _SETTLED_NS:
        return None
    return path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _tensor(entry: TensorEntry, data: NDArray[np.uint8]) -> GgufTensor:
    cols = entry.dims[0]
    rows = 1
    for dim in entry.dims[1:]:
        rows *= dim
    body = data[entry.offset : entry.offset + entry.n_bytes].reshape(rows, entry.n_bytes // rows)
    return GgufTensor(entry.name, (rows, cols), entry.kind, body)
