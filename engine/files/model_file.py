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
    ``weight_files``: the files whose bytes are the weights, in order, and ``opened_as`` what each was before it was
    mapped.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    weight_files: tuple[Path, ...]
    opened_as: tuple[FileState | None, ...] = field(default=(), repr=False)

    def weights_sha256(self) -> str:
        """A digest of all weight files: of one file, its SHA-256; of several, that of their SHA-256s in order.

        Every byte is read. Raises OSError, ModelInvalid as ``check_unchanged``.
        """
        with ThreadPoolExecutor(_HASHERS) as pool:
            digests = list(pool.map(hashed_sha256, self.weight_files))
        self.check_unchanged()
        return _joined(digests)

    def known_weights_sha256(self) -> str | None:
        """The same without reading, if it is remembered of these very files. Raises ModelInvalid."""
        known = [digest for digest in map(remembered_sha256, self.weight_files) if digest is not None]
        self.check_unchanged()
        return _joined(known) if len(known) == len(self.weight_files) else None

    def check_unchanged(self) -> None:
        """Raises ModelInvalid when a weight file is not what it was when it was opened: its digest, which is asked for
        by its path, would be that of other bytes than those that are mapped."""
        for path, opened in zip(self.weight_files, self.opened_as, strict=False):
            if file_state(path) != opened:
                raise ModelInvalid(
                    f"{path} was replaced or written to while it was read: start again when that is done"
                )


FileState = tuple[int, int, int, int]
"""Device, inode, bytes, and when they were written last."""


def file_state(path: Path) -> FileState | None:
    """None for a file that cannot be looked at; whoever opens it says why."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


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
