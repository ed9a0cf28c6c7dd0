"""Letting go of mapped pages between two layers, inside the call that runs a step."""

from __future__ import annotations

from typing import Any, Final

from numba import types

from kvferry.engine.kernels.jit import kernel

_MADV_DONTNEED: Final = 4  # on every Linux that we compile for

_system: Any = types  # numba says nothing about its types to ours
_madvise: Final = _system.ExternalFunction("madvise", _system.int32(_system.intp, _system.uintp, _system.int32))


@kernel
def let_go(at: int, n_bytes: int) -> None:
    """Take pages of a read-only map of a file out of this process's memory; whoever reads them again gets them from
    the system's cache, or from the disk. They stay where the system refuses."""
    if n_bytes > 0:
        _madvise(at, n_bytes, _MADV_DONTNEED)
