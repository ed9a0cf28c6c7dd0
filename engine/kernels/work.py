"""How the threads of a step share the work of a phase: each takes portions from a counter until none are left."""

from __future__ import annotations

from typing import Any

from kvferry.engine.kernels.intrinsics import atomic_add
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import CACHE_LINE


@kernel
def portion_of(n_units: int, n_rows: int, n_threads: int) -> int:
    """How many units a thread takes at a time: a long run when there is one row, so that weights are read in long
    streams; one by one when there are many, so that no thread waits long for another at the end."""
    return (n_units + n_threads - 1) // n_threads if n_rows == 1 else 1


@kernel
def take(workspace: Any, phase: int, portion: int) -> int:
    """The first of the next ``portion`` units of a phase; each goes to one thread, whichever comes first."""
    return atomic_add(workspace.counters_at + phase * CACHE_LINE, portion)
