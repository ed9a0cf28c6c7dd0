"""The decorator of all jitted code: no GIL, no fast-math, compiled once and kept on disk (compile_cache.py)."""

from __future__ import annotations

from typing import Any, Final

import numba

from kvferry.engine.kernels import compile_cache

compile_cache.use()

# error_model "numpy": an integer division checks nothing. Numba's default for fastmath is off, and LLVM fuses nothing
# that was not asked for by name: the bit contract rests on both.
kernel: Final[Any] = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
