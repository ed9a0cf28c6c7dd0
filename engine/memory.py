"""Memory that the kernels stream through: on huge pages where the system has them, else on ordinary ones.

A processor looks up a page's address for every page that it reads; with 4 KiB pages that is a fifth of the time of a
decode. Asking is done per mapping, so whatever is read together lies in one mapping.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kernels.layout import CACHE_LINE

HUGE_PAGE: Final = 1 << 21
_HUGE_ADVICE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)


def huge_empty(n_bytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that starts on a huge page's border; its pages are taken when they are first touched.

    Raises MemoryError.
    """
    try:
        mapping = mmap.mmap(-1, n_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"the system gives no {n_bytes} bytes of memory") from error
    region = np.frombuffer(mapping, np.uint8)
    start = -region.ctypes.data % HUGE_PAGE
    ask_for_huge_pages(mapping, start, n_bytes)
    return region[start : start + n_bytes]


def ask_for_huge_pages(mapping: mmap.mmap, start: int, n_bytes: int) -> None:
    """Where the system has none, or not for this kind of mapping, small ones do."""
    if _HUGE_ADVICE is None or n_bytes == 0:
        return
    try:
        mapping.madvise(_HUGE_ADVICE, start, n_bytes)
    except OSError:
        return


def aligned_empty(n_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory that starts on a cache line."""
    raw = np.empty(n_bytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + n_bytes]
