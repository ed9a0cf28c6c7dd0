"""Giving back the memory of a mapped file's pages when they have been read."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.files.tensors import Columns, FramePatches, PairedRows, StoredRows, Tensor


def drop_pages(tensor: Tensor, start: int = 0, stop: int | None = None) -> None:
    """Let go of the pages that rows [start, stop) of a tensor lie on; whoever reads them again reads the file again.

    Does nothing for bytes that are not a map of a file, and where the system knows no such advice.
    """
    if isinstance(tensor, FramePatches):
        for frame in tensor.frames:
            drop_pages(frame, start, stop)
    elif isinstance(tensor, StoredRows | PairedRows):
        _drop(tensor.data[start:stop])
    elif isinstance(tensor, Columns) and stop in (None, tensor.shape[0]):  # every row lies on all of its pages
        _drop(tensor.data)


def _drop(data: NDArray[Any]) -> None:
    root: Any = data
    while isinstance(root, np.ndarray):
        root = root.base
    if isinstance(root, memoryview):
        root = root.obj
    if not isinstance(root, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first_byte = np.frombuffer(root, np.uint8, 1).ctypes.data
    # The page that begins before us held what was read before us, the one that ends behind us what comes next.
    start = (data.ctypes.data - first_byte) // mmap.PAGESIZE * mmap.PAGESIZE
    stop = (data.ctypes.data - first_byte + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        root.madvise(mmap.MADV_DONTNEED, start, stop - start)
