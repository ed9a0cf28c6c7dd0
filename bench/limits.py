"""What this machine can do at most, by one thread: reading memory, integer dot products, float fused multiply-adds.

Measured with the instructions that the kernels use, on operands that stay in registers, so that a share of a peak says
how far a kernel is from the best that its instructions allow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numba import extending, types

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.intrinsics import ISA
from kvferry.engine.kernels.layout import WEIGHTS_Q4

_CHAINS: Final = 10  # independent accumulators: more than the instructions' latency, fewer than there are registers
_READ_BYTES: Final = 1 << 28
_REPEATS: Final = 5

_njit: Final[Any] = numba.njit(nogil=True, error_model="numpy")


@dataclass(frozen=True)
class Limits:
    """Of one thread: bytes read per second, integer and float operations per second (a product and its sum are two)."""

    read_bytes: float
    integer_ops: float
    float_ops: float


def _float_chains(_context: Any, rounds: Any) -> Any:  # noqa: ARG001 - numba reads them as the signature
    def build(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        kind = t.float_vector(ISA.float_lanes)
        slots = [t.variable(builder, kind, t.constant(kind, 1.0 + i / 64), "sum") for i in range(_CHAINS)]
        factor = t.constant(kind, 0.999)

        def one_round(_index: Any) -> None:
            for slot in slots:
                builder.store(t.fma(builder, t.value_of(builder, slot), factor, factor), slot)

        t.counted_loop(builder, values[0], one_round, "chains")
        total = t.value_of(builder, slots[0])
        for slot in slots[1:]:
            total = builder.fadd(total, t.value_of(builder, slot))
        return builder.extract_element(total, t.int_constant(0, t.I32))

    return types.float32(types.int64), build


def _integer_chains(_context: Any, rounds: Any, address: Any) -> Any:  # noqa: ARG001 - the same
    def build(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        dot, zero = ISA.dot, t.at(builder, values[1])
        activations = dot.broadcast(builder, zero)
        raw = t.load(builder, t.vector(t.I8, 4 * ISA.group_rows), zero)
        nothing = dot.start(builder, WEIGHTS_Q4, zero)
        start = dot.step(builder, WEIGHTS_Q4, nothing, dot.prepare(builder, WEIGHTS_Q4, raw), activations)
        parts = start if isinstance(start, tuple) else (start,)
        slots = [[t.variable(builder, part.type, part, "sum") for part in parts] for _ in range(_CHAINS // len(parts))]

        def one_round(_index: Any) -> None:
            weights = dot.prepare(builder, WEIGHTS_Q4, raw)
            for chain in slots:
                now = tuple(t.value_of(builder, slot) for slot in chain)
                total = dot.step(builder, WEIGHTS_Q4, now if len(now) > 1 else now[0], weights, activations)
                if ISA.pin_class is not None:  # nothing is known of a pinned value: no round can be left out
                    total = t.pin(builder, total, ISA.pin_class)
                for slot, part in zip(chain, total if isinstance(total, tuple) else (total,), strict=True):
                    builder.store(part, slot)

        t.counted_loop(builder, values[0], one_round, "chains")
        first = builder.extract_element(t.value_of(builder, slots[0][0]), t.int_constant(0, t.I32))
        return builder.zext(first, t.I64)

    return types.int64(types.int64, types.int64), build


_float_chains_intrinsic: Final[Any] = extending.intrinsic(_float_chains)
_integer_chains_intrinsic: Final[Any] = extending.intrinsic(_integer_chains)


def _run_floats(rounds: Any) -> Any:
    return _float_chains_intrinsic(rounds)


def _run_integers(rounds: Any, address: Any) -> Any:
    return _integer_chains_intrinsic(rounds, address)


def _read(words: Any) -> Any:
    quarter = words.size // 4
    total = np.uint64(0)
    for i in range(quarter):
        total += words[i] ^ words[quarter + i] ^ words[2 * quarter + i] ^ words[3 * quarter + i]
    return total


_compiled_floats: Final[Any] = _njit(_run_floats)
_compiled_integers: Final[Any] = _njit(_run_integers)
_compiled_read: Final[Any] = _njit(_read)


def _best(run: Callable[[], object]) -> float:
    """Least processor seconds of a few runs: a limit is what the machine can do undisturbed."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        started_at = time.thread_time()
        run()
        seconds.append(time.thread_time() - started_at)
    return min(seconds)


def measure_limits() -> Limits:
    """About two seconds of computing."""
    words = np.ones(_READ_BYTES // 8, np.uint64)
    rounds = 10_000_000
    zeros = np.zeros(256, np.uint8)
    chains = _CHAINS // (2 if ISA.name == "neon-dotprod" else 1)
    return Limits(
        read_bytes=_READ_BYTES / _best(lambda: _compiled_read(words)),
        integer_ops=rounds
        * chains
        * ISA.group_rows
        * 4
        * 2
        / _best(lambda: _compiled_integers(rounds, zeros.ctypes.data)),
        float_ops=rounds * _CHAINS * ISA.float_lanes * 2 / _best(lambda: _compiled_floats(rounds)),
    )
