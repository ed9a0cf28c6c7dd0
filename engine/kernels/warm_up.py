"""Compile all kernels and publish them: ``python -m kvferry.engine.kernels.warm_up [PART]``.

compile_cache.py runs this in a child process, so that a compiler that crashes takes nothing else down.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numba
import numpy as np
from numba import types
from numba.core import event
from numba.core.registry import CPUDispatcher

from kvferry.engine.kernels import forward, kv_copy, kv_read, packing, packing_stored, records, sync, vision
from kvferry.engine.kernels.compile_cache import ALWAYS, MORE_KINDS, compile_cache
from kvferry.engine.kernels.layout import WEIGHT_FORMATS
from kvferry.engine.kernels.linear import ALWAYS_KINDS, kernels_of
from kvferry.terminal.progress import Gauge, gauge

_INT: Final = types.int64
_WHAT: Final = "compiling kernels for this processor"


def compile_all() -> None:
    """Compile, or load from the cache, every function that Python code calls with any model."""
    typeof: Any = numba.typeof
    record_types = [typeof(np.zeros(1, r)) for r in (records.MODEL, records.LAYER, records.WORKSPACE, records.STEP)]
    sync.prepare_control.compile((_INT, _INT))
    sync.free_slot.compile((_INT, _INT))
    sync.announce_step.compile((_INT, _INT, _INT))
    for kind in ALWAYS_KINDS:
        kernels_of(kind)
    packing_stored.pack_q4_1.compile((_INT,) * 4)
    packing_stored.pack_q8_0.compile((_INT,) * 4)
    packing_stored.pack_q4_0.compile((_INT,) * 5)
    table = types.Array(types.int32, 1, "C")
    scales = typeof((np.zeros((1, 1), np.uint8),) * 2)
    for element in (types.uint32, types.uint16, types.uint8):
        tiles, rows = types.Array(element, 5, "C"), types.Array(element, 2, "C")
        for copy in (kv_copy.rows_to_tiles, kv_copy.tiles_to_rows):
            copy.compile((tiles, _INT, table, _INT, rows, rows, scales, _INT))
    digests = types.Array(types.uint8, 1, "C", readonly=True)
    kv_read.read_tiles.compile((_INT,) * 4 + (table, digests) + (_INT,) * 3)
    tiles = types.Array(types.uint32, 5, "C")
    kv_read.read_rows.compile((_INT,) * 4 + (tiles, _INT, table, _INT, _INT))
    vision.quantise_rows.compile((_INT,) * 4)
    vision.layer_norm_rows.compile((_INT, _INT, _INT, _INT, _INT, types.float32, _INT))
    vision.gelu_rows.compile((_INT,) * 4)
    vision.linear_units.compile((_INT,) * 12)
    vision.attend_head.compile((_INT,) * 7)
    packed = types.Array(types.uint8, 3, "C")
    floats, scales, bits = (types.Array(kind, 2, "C") for kind in (types.float32, types.float32, types.uint16))
    packing.block_extremes.compile((floats, scales, scales))
    packing.pack_floats_q8.compile((floats, scales, bits, packed))
    packing.pack_floats_q4.compile((floats, scales, scales, bits, bits, packed))
    forward.run_steps.compile((*record_types, _INT, _INT, _INT))  # calls nearly all others: last, for an even progress


def compile_more_kinds() -> None:
    """The same for what only models with q5 or K-quant weights need."""
    from kvferry.engine.kernels.packing_more import PACKERS

    kinds = set(WEIGHT_FORMATS) - set(ALWAYS_KINDS)
    with gauge(_WHAT, len(kinds) + len(PACKERS), in_bytes=False) as told:
        for kind in kinds:
            kernels_of(kind)
            told.advance(1)
        for pack in PACKERS.values():
            pack.compile((_INT,) * 4)
            told.advance(1)


class _Compiled(event.Listener):
    """Tells a gauge of each kernel, the first time that it was compiled or loaded."""

    def __init__(self, kernels: set[CPUDispatcher], told: Gauge) -> None:
        self._left, self._told = set(kernels), told

    def on_start(self, event: event.Event) -> None:
        """Nothing is done yet."""

    def on_end(self, event: event.Event) -> None:
        kernel = event.data["dispatcher"]
        if kernel in self._left:
            self._left.remove(kernel)
            self._told.advance(1)


@contextmanager
def told_progress() -> Iterator[None]:
    """Standard error is told how many of the kernels are ready: it takes up to a minute at a first start."""
    modules = [module for name, module in sys.modules.items() if name.startswith("kvferry.engine.kernels.")]
    kernels = {each for module in modules for each in vars(module).values() if isinstance(each, CPUDispatcher)}
    kernels = {kernel for kernel in kernels if kernel.targetoptions.get("inline") != "always"}  # part of their callers
    hears: Any = event
    with gauge(_WHAT, len(kernels), in_bytes=False) as told:
        listener = _Compiled(kernels, told)
        hears.register("numba:compile", listener)
        try:
            yield
        finally:
            hears.unregister("numba:compile", listener)


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else ALWAYS
    if part == MORE_KINDS:
        compile_more_kinds()
    else:
        with told_progress():
            compile_all()
    compile_cache(part).publish()
