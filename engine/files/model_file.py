"""A model on disk, as the engine sees it: a shape and tensors by the engine's own names, wherever they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.errors import ModelInvalid, ModelNotFound
from kvferry.engine.files.known_digests import hashed_sha256, remembered_sha256
from kvferry.engine.files.regular import exists, fault_of
from kvferry.engine.files.tensors import Tensor

_HASHERS: Final = 4  # files that are hashed at once


@dataclass(frozen=True)
class ModelFile:
    """An opened model. Nothing but headers has been read; rows are read when they are asked for.

    ``tensors``: by the names of ``tensor_names.py``, each with the shape that ``config`` asks for. q and k rows are in
    the order in which rope turns (i, i + head_dim/2), whatever ``config.rope_adjacent_pairs`` says of the file.
    ``weight_files``: the files whose bytes are the weights, in order.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    weight_files: tuple[Path, ...]

    def weights_sha256(self) -> str:
        """A digest of all weight files: of one file, its SHA-256; of several, that of their SHA-256s in order.

        Every byte is read. Raises OSError.
        """
        with ThreadPoolExecutor(_HASHERS) as pool:
            return _joined(list(pool.map(hashed_sha256, self.weight_files)))

    def known_weights_sha256(self) -> str | None:
        """The same without reading, if it is remembered of these very files."""
        known = [digest for digest in map(remembered_sha256, self.weight_files) if digest is not None]
        return _joined(known) if len(known) == len(self.weight_files) else None


def _joined(digests: list[str]) -> str:
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def map_file(path: Path) -> NDArray[np.uint8]:
    """A file's bytes as a read-only map. Raises ModelNotFound, ModelInvalid."""
    fault = fault_of(path)
    if fault is not None and not exists(path):
        raise ModelNotFound(f"{path} {fault}; see `kvferry models list` for what is fetched")
    if fault is not None:
        raise ModelInvalid(f"{path} {fault}")
    try:
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            raise ModelInvalid(f"{path} is empty, so it is not a model file")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{path} cannot be read: {error}") from error
