"""How threads of one step meet: a barrier, counters to take work from, and waiting that gives the core away.

Waiting spins first (a barrier is usually a fraction of a microsecond away), then yields, then sleeps: when another
process holds the core that the last thread needs, spinning would keep it from ever arriving.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from kvferry.engine.kernels.intrinsics import atomic_add, atomic_exchange, atomic_load, spin_hint
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import CACHE_LINE

# The control area: int64 fields, one cache line each, so that waiting on one does not slow writers of another.
BARRIER_ARRIVED: Final = 0 * CACHE_LINE
BARRIER_GENERATION: Final = 1 * CACHE_LINE
STEP_GENERATION: Final = 2 * CACHE_LINE
CONTROL_BYTES: Final = 3 * CACHE_LINE

_SPINS: Final = 400  # about 20 microseconds where the spin hint takes 140 cycles
_YIELDS: Final = 50
_SLEEP_MICROSECONDS: Final = 50
IDLE_SLEEPS: Final = 40  # a worker without a step for some milliseconds goes to sleep for good

_sched_yield: Final[Any] = types.ExternalFunction("sched_yield", types.int32())
_usleep: Final[Any] = types.ExternalFunction("usleep", types.int32(types.uint32))


@kernel
def pause(attempt: int) -> None:
    """Wait a little: longer, and more generously to others, the more attempts there were."""
    if attempt < _SPINS:
        spin_hint()
    elif attempt < _SPINS + _YIELDS:
        _sched_yield()
    else:
        _usleep(_SLEEP_MICROSECONDS)


@kernel
def barrier(control: int, n_threads: int) -> None:
    """Return when all threads have called it; everything written before is visible after."""
    if n_threads == 1:
        return
    generation = atomic_load(control + BARRIER_GENERATION)
    if atomic_add(control + BARRIER_ARRIVED, 1) == n_threads - 1:
        atomic_exchange(control + BARRIER_ARRIVED, 0)
        atomic_add(control + BARRIER_GENERATION, 1)
        return
    attempt = np.int64(0)
    while atomic_load(control + BARRIER_GENERATION) == generation:
        pause(attempt)
        attempt += 1


@kernel
def announce_step(control: int) -> None:
    """Let the workers start: everything written before is visible to them."""
    atomic_add(control + STEP_GENERATION, 1)


@kernel
def await_step(control: int, generation: int) -> bool:
    """Wait for a step after ``generation``; False when none came for some milliseconds."""
    attempt = np.int64(0)
    while atomic_load(control + STEP_GENERATION) == generation:
        if attempt > _SPINS + _YIELDS + IDLE_SLEEPS:
            return False
        pause(attempt)
        attempt += 1
    return True
