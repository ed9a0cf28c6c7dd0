"""Compile all kernels and publish them: ``python -m kvferry.engine.kernels.warm_up``.

compile_cache.py runs this in a child process, so that a compiler that crashes takes nothing else down.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numba import types

from kvferry.engine.kernels import forward, packing, records, sync, vision
from kvferry.engine.kernels.compile_cache import compile_cache
from kvferry.engine.kernels.layout import WEIGHT_KINDS
from kvferry.engine.kernels.linear import kernels_of

_INT: Final = types.int64


def compile_all() -> None:
    """Compile, or load from the cache, every function that Python code calls."""
    typeof: Any = numba.typeof
    record_types = [typeof(np.zeros(1, r)) for r in (records.MODEL, records.LAYER, records.WORKSPACE, records.STEP)]
    forward.run_steps.compile((*record_types, _INT, _INT, _INT))
    for kind in WEIGHT_KINDS:
        kernels_of(kind)
    sync.prepare_control.compile((_INT, _INT))
    sync.free_slot.compile((_INT, _INT))
    sync.announce_step.compile((_INT, _INT, _INT))
    source = types.Array(types.uint8, 2, "C", readonly=True)
    rows = types.Array(types.int64, 1, "C")
    packed = types.Array(types.uint8, 3, "C")
    packing.pack_q4_1.compile((source, rows, packed))
    packing.pack_q8_0.compile((source, rows, packed))
    vision.quantise_rows.compile((_INT,) * 4)
    vision.layer_norm_rows.compile((_INT, _INT, _INT, _INT, _INT, types.float32, _INT))
    vision.gelu_rows.compile((_INT,) * 4)
    vision.linear_units.compile((_INT,) * 12)
    vision.attend_head.compile((_INT,) * 7)
    floats, scales, bits = (types.Array(kind, 2, "C") for kind in (types.float32, types.float32, types.uint16))
    packing.block_extremes.compile((floats, scales, scales))
    packing.pack_floats_q8.compile((floats, scales, bits, packed))
    packing.pack_floats_q4.compile((floats, scales, scales, bits, bits, packed))
    packing.pack_q4_0.compile((source, types.Array(types.uint8, 2, "C"), rows, packed))


if __name__ == "__main__":
    compile_all()
    compile_cache().publish()
