"""What this machine can do at most: reading memory, integer dot products, float fused multiply-adds.

Reading: a region far larger than any cache, on huge pages, by eight streams of 64-byte loads, each prefetched: of all
patterns that were tried (1 to 16 streams, with and without prefetching into each cache, small pages and huge), none
reads more. Computing: the instructions that the kernels use, on operands that stay in registers, so that a share of a
peak says how far a kernel is from the best that its instructions allow.

Seconds are the slowest thread's processor time, so that a busy neighbour does not make the limit lower and our share
higher; on a quiet machine that is the wall clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
import psutil
from numba import extending, types

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels import vision as kernels
from kvferry.engine.kernels.intrinsics import ISA
from kvferry.engine.kernels.layout import (
    CACHE_LINE,
    FLOAT_BYTES,
    QUANT_BLOCK,
    WEIGHTS_Q4,
    activation_row_bytes,
    weight_block_bytes,
)
from kvferry.engine.kernels.linear import UNIT_ROWS, kernels_of
from kvferry.engine.memory import aligned_empty, huge_empty

_CHAINS: Final = 12  # independent accumulators: more than the instructions' latency, fewer than there are registers
_ROUNDS: Final = 10_000_000
_REPEATS: Final = 5
_READ_BYTES: Final = 1 << 30
_STREAMS: Final = 8
_LINES: Final = 2  # of one stream in a row
_AHEAD: Final = 1024  # bytes that a stream is prefetched ahead
GEMM_SHAPE: Final = (512, 6144, 2048)  # tokens, outputs, inputs

_njit: Final[Any] = numba.njit(nogil=True, error_model="numpy")


@dataclass(frozen=True)
class Limits:
    """Of all ``n_threads`` together: bytes read per second, integer and float operations per second (a product and its
    sum are two)."""

    n_threads: int
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
        activations = dot.broadcast(builder, zero, 0)
        raw = t.load(builder, t.vector(t.I8, 4 * ISA.group_rows), zero)
        nothing = dot.start(builder, WEIGHTS_Q4, zero, zero)
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


def _streams(_context: Any, address: Any, stream_bytes: Any) -> Any:  # noqa: ARG001 - the same
    def build(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        kind = t.vector(t.I64, CACHE_LINE // 8)
        sums = [t.variable(builder, kind, t.constant(kind, 0), "sum") for _ in range(_STREAMS)]

        def lines_of_all(index: Any) -> None:
            offset = t.scaled(builder, index, _LINES * CACHE_LINE)
            for stream, slot in enumerate(sums):
                start = builder.add(builder.add(values[0], t.scaled(builder, values[1], stream)), offset)
                for line in range(0, _LINES * CACHE_LINE, CACHE_LINE):
                    t.prefetch(builder, t.at(builder, start, _AHEAD + line))
                    words = t.load(builder, kind, t.at(builder, start, line), CACHE_LINE)
                    builder.store(builder.xor(t.value_of(builder, slot), words), slot)

        t.counted_loop(builder, builder.sdiv(values[1], t.int_constant(_LINES * CACHE_LINE)), lines_of_all, "read")
        total = t.value_of(builder, sums[0])
        for slot in sums[1:]:
            total = builder.xor(total, t.value_of(builder, slot))
        return builder.extract_element(total, t.int_constant(0, t.I32))

    return types.int64(types.int64, types.int64), build


_float_chains_intrinsic: Final[Any] = extending.intrinsic(_float_chains)
_integer_chains_intrinsic: Final[Any] = extending.intrinsic(_integer_chains)
_streams_intrinsic: Final[Any] = extending.intrinsic(_streams)


def _run_floats(rounds: Any) -> Any:
    return _float_chains_intrinsic(rounds)


def _run_integers(rounds: Any, address: Any) -> Any:
    return _integer_chains_intrinsic(rounds, address)


def _read(address: Any, stream_bytes: Any) -> Any:
    return _streams_intrinsic(address, stream_bytes)


_compiled_floats: Final[Any] = _njit(_run_floats)
_compiled_integers: Final[Any] = _njit(_run_integers)
_compiled_read: Final[Any] = _njit(_read)


class ReadProbe:
    """A region to read, touched once, and how fast it is read: to be asked again and again beside what it judges."""

    def __init__(self, n_bytes: int | None = None) -> None:
        self._region = huge_empty(n_bytes or min(_READ_BYTES, psutil.virtual_memory().available // 4))
        self._region[::4096] = 1
        _compiled_read(self._region.ctypes.data, np.int64(CACHE_LINE * _LINES))

    def measure(self, n_threads: int) -> float:
        """Bytes per second that so many threads read together, each a part of its own."""
        share = self._region.nbytes // n_threads
        stream = share // _STREAMS // 4096 * 4096
        at = self._region.ctypes.data
        seconds = _together(n_threads, lambda thread: _compiled_read(at + thread * share, np.int64(stream)))
        return n_threads * _STREAMS * stream / seconds


def measure_limits(probe: ReadProbe, n_threads: int = 1) -> Limits:
    """The best of some runs: a limit is what the machine can do undisturbed. Takes two seconds."""
    zeros = np.zeros(256, np.uint8)
    chains = _CHAINS // (2 if ISA.name.startswith("neon") else 1)
    a_round = n_threads * _ROUNDS
    return Limits(
        n_threads,
        read_bytes=max(probe.measure(n_threads) for _ in range(_REPEATS)),
        integer_ops=a_round * chains * ISA.group_rows * 4 * 2
        / _least(lambda: _together(n_threads, lambda _: _compiled_integers(_ROUNDS, zeros.ctypes.data))),
        float_ops=a_round * _CHAINS * ISA.float_lanes * 2
        / _least(lambda: _together(n_threads, lambda _: _compiled_floats(_ROUNDS))),
    )  # fmt: skip


def gemm_ops(shape: tuple[int, int, int] = GEMM_SHAPE) -> float:
    """Integer operations per second of one thread in a q4 linear layer of many tokens, the best of some runs."""
    n_tokens, n_outputs, n_inputs = shape
    n_blocks, stride = n_inputs // QUANT_BLOCK, activation_row_bytes(n_inputs)
    weights = huge_empty(n_outputs // ISA.group_rows * n_blocks * weight_block_bytes(WEIGHTS_Q4, ISA.group_rows))
    weights[:] = 0x2C  # halves of 0.065; how fast it goes does not depend on the numbers
    floats = np.ones((n_tokens, n_inputs), np.float32)
    rows = aligned_empty(n_tokens * stride)
    kernels.quantise_rows(floats.ctypes.data, n_tokens, n_blocks, rows.ctypes.data)
    bias = np.zeros(n_outputs, np.float32)
    out = np.empty((n_tokens, n_outputs), np.float32)
    n_units = n_outputs // UNIT_ROWS

    def run(_thread: int) -> None:
        kernels.linear_units(
            kernels_of(WEIGHTS_Q4), weights.ctypes.data, n_blocks, 0, n_units, rows.ctypes.data, stride, n_tokens,
            out.ctypes.data, n_outputs * FLOAT_BYTES, bias.ctypes.data, 0,
        )  # fmt: skip

    return 2 * n_tokens * n_outputs * n_inputs / _least(lambda: _together(1, run))


def _together(n_threads: int, work: Callable[[int], object]) -> float:
    """Processor seconds of the slowest of some threads that work at the same time."""
    start = threading.Barrier(n_threads)
    seconds = [0.0] * n_threads

    def run(thread: int) -> None:
        start.wait()
        began_at = time.thread_time()
        work(thread)
        seconds[thread] = time.thread_time() - began_at

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(1, n_threads)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return max(seconds)


def _least(measure: Callable[[], float]) -> float:
    measure()
    return min(measure() for _ in range(_REPEATS))
