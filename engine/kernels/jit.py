"""The decorator of all jitted code: no GIL, no fast-math, compiled once and kept on disk (compile_cache.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding

from kvferry.engine.kernels.compile_cache import ALWAYS, numba_caching_here
from kvferry.engine.kernels.cpu_features import tell_compiler

tell_compiler()
binding.initialize_native_asmparser()  # for kernels that name an instruction (ir_tools.fma_in_place)


def kernel(function: Callable[..., Any], part: str = ALWAYS) -> Any:
    """Compile on first call. A literal argument would get a compilation of its own: wrap it in np.int64 at the call.

    Numba's default is no fast-math, and LLVM fuses nothing that was not asked for by name: the bit contract rests on
    both. ``error_model="numpy"`` makes integer division check nothing. ``part``: of the cache, see compile_cache.py.
    """
    with numba_caching_here(part):
        return numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")(function)


def callback(signature: Any, part: str = ALWAYS) -> Callable[[Callable[..., Any]], Any]:
    """Jitted code that other jitted code calls by ``.address``; compiled, or loaded, when that is first asked for.

    May be defined anew for each value of some integers: they are constants to it, and part of the key it is kept under.
    """

    cfunc: Any = numba.cfunc  # its annotations do not know of the options that it takes

    def decorate(function: Callable[..., Any]) -> Any:
        with numba_caching_here(part):
            return cfunc(signature, cache=True, boundscheck=False, error_model="numpy")(function)

    return decorate


def glue(function: Callable[..., Any]) -> Any:
    """Jitted code that becomes part of its caller before compilation.

    Numba optimises everything a function calls again for that function, so each level of calls costs compile time.
    """
    return numba.njit(inline="always")(function)
