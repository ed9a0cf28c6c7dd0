"""What differs between processors: how many rows a weight group has and how an integer dot product is spelt.

Everything a dot product returns is an exact integer, so which of these runs never shows in a result.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.cpu_features import ARM_MACHINES, host_features
from kvferry.engine.kernels.ir_tools import Builder, Type, Value
from kvferry.engine.kernels.layout import ACTIVATION_MAX, QUANT_BLOCK, WEIGHT_FORMATS, WEIGHTS_Q8

SINGLE_STREAMS: Final = 4  # weight groups that a single row's product reads side by side
_STEPS: Final = QUANT_BLOCK // 4  # of a block


class DotProduct(Protocol):
    """Dot products of one weight group (R rows, lane = row) with 4 activation bytes at a time.

    The accumulator is whatever the instructions need; ``finish`` makes it an int32 vector of R lanes. Weights arrive as
    <4R x i8>, signed or not as their kind's format says. Activations lie in [-127, 127].
    """

    def steps(self, kind: int) -> int:
        """How many steps an accumulator takes before it must be finished."""

    def start(self, builder: Builder, kind: int, activations: Value, sum_offset: Value) -> Value | None:
        """The accumulator before the first step. ``activations`` points at the first step's 4 bytes, ``sum_offset`` at
        the block's -128 * sum."""

    def prepare(self, builder: Builder, kind: int, weights: Value) -> Value:
        """What can be computed once per weight vector and used for all tokens."""

    def broadcast(self, builder: Builder, activations: Value, k_group: int) -> Value:
        """Bytes 4 * k_group and on of the block that the pointer points at, four of them, for every row."""

    def step(self, builder: Builder, kind: int, total: Value | None, weights: Value, activations: Value) -> Value:
        """The accumulator after 4 more k."""

    def finish(self, builder: Builder, kind: int, total: Value) -> Value:
        """<R x i32> with the block's dot product per row."""


class Vnni:
    """x86 vpdpbusd (unsigned x signed bytes, four products added to an int32): 16 rows, or 8 without AVX-512."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.total: Type = t.vector(t.I32, rows)
        self.bytes: Type = t.vector(t.I8, 4 * rows)
        self.intrinsic = f"llvm.x86.avx512.vpdpbusd.{32 * rows}"

    def steps(self, kind: int) -> int:
        return _STEPS // WEIGHT_FORMATS[kind].n_scales

    def start(self, builder: Builder, kind: int, activations: Value, sum_offset: Value) -> Value:
        """Takes off in advance what prepare() adds: magnitude * sum of the activations."""
        weights = WEIGHT_FORMATS[kind]
        nothing = t.constant(self.total, 0)
        if not weights.is_signed:
            return nothing
        if kind == WEIGHTS_Q8:
            return t.splat(builder, t.load(builder, t.I32, sum_offset), self.rows)
        each, added = builder.bitcast(t.constant(self.bytes, weights.magnitude), self.total), nothing
        for step in range(self.steps(kind)):
            values = self.broadcast(builder, activations, step)
            added = self.step(builder, kind, added, each, values)
        return builder.sub(nothing, added)

    def prepare(self, builder: Builder, kind: int, weights: Value) -> Value:
        if WEIGHT_FORMATS[kind].is_signed:
            weights = builder.add(weights, t.constant(self.bytes, WEIGHT_FORMATS[kind].magnitude))
        return builder.bitcast(weights, self.total)

    def broadcast(self, builder: Builder, activations: Value, k_group: int) -> Value:
        return t.splat(builder, t.load(builder, t.I32, t.beyond(builder, activations, 4 * k_group)), self.rows)

    def step(self, builder: Builder, kind: int, total: Value, weights: Value, activations: Value) -> Value:
        return t.call(builder, self.intrinsic, self.total, total, weights, activations)

    def finish(self, builder: Builder, kind: int, total: Value) -> Value:
        return total


class Avx2:
    """pmaddubsw (unsigned x signed bytes, pairs added in int16) and pmaddwd (pairs of int16 added in int32), 8 rows."""

    def __init__(self) -> None:
        self.bytes: Type = t.vector(t.I8, 32)
        self.shorts: Type = t.vector(t.I16, 16)
        self.total: Type = t.vector(t.I32, 8)

    def steps(self, kind: int) -> int:
        whole, fit = _STEPS // WEIGHT_FORMATS[kind].n_scales, self._fit_shorts(kind)
        return whole if fit == 1 else min(whole, fit)

    def _fit_shorts(self, kind: int) -> int:
        """How many steps fit an int16: 8 of q4 (8 * 2 * 15 * 127 = 30480), 4 of q5 and q6, one of q8 (32512)."""
        return 0x7FFF // (2 * WEIGHT_FORMATS[kind].magnitude * ACTIVATION_MAX)

    def start(self, builder: Builder, kind: int, activations: Value, sum_offset: Value) -> None:
        return None

    def prepare(self, builder: Builder, kind: int, weights: Value) -> Value:
        if not WEIGHT_FORMATS[kind].is_signed:
            return weights
        magnitude = t.call(builder, "llvm.abs.v32i8", self.bytes, weights, t.int_constant(0, t.I1))
        return weights, magnitude

    def broadcast(self, builder: Builder, activations: Value, k_group: int) -> Value:
        four = t.load(builder, t.I32, t.beyond(builder, activations, 4 * k_group))
        return builder.bitcast(t.splat(builder, four, 8), self.bytes)

    def step(self, builder: Builder, kind: int, total: Value | None, weights: Value, activations: Value) -> Value:
        if WEIGHT_FORMATS[kind].is_signed:  # the weight's sign moves over to the activation
            signed, weights = weights
            activations = t.call(builder, "llvm.x86.avx2.psign.b", self.bytes, activations, signed)
        pairs = t.call(builder, "llvm.x86.avx2.pmadd.ub.sw", self.shorts, weights, activations)
        return self._plus(builder, total, pairs if self._fit_shorts(kind) > 1 else self._pair_sums(builder, pairs))

    def finish(self, builder: Builder, kind: int, total: Value) -> Value:
        return self._pair_sums(builder, total) if self._fit_shorts(kind) > 1 else total

    def _plus(self, builder: Builder, total: Value | None, term: Value) -> Value:
        return term if total is None else builder.add(total, term)

    def _pair_sums(self, builder: Builder, shorts: Value) -> Value:
        return t.call(builder, "llvm.x86.avx2.pmadd.wd", self.total, shorts, t.constant(self.shorts, 1))


class NeonDot:
    """AArch64 sdot (signed bytes, four products added to an int32); 8 rows are two registers."""

    def __init__(self) -> None:
        self.bytes: Type = t.vector(t.I8, 16)
        self.total: Type = t.vector(t.I32, 4)

    def steps(self, kind: int) -> int:
        return _STEPS // WEIGHT_FORMATS[kind].n_scales

    def start(self, builder: Builder, kind: int, activations: Value, sum_offset: Value) -> Value:
        return t.constant(self.total, 0), t.constant(self.total, 0)

    def prepare(self, builder: Builder, kind: int, weights: Value) -> Value:
        return t.shuffle(builder, weights, list(range(16))), t.shuffle(builder, weights, list(range(16, 32)))

    def broadcast(self, builder: Builder, activations: Value, k_group: int) -> Value:
        """Sixteen bytes and one of their four lanes, which sdot selects by itself."""
        lanes = t.load(builder, self.total, t.beyond(builder, activations, k_group // 4 * 16), 1)
        return builder.bitcast(t.shuffle(builder, lanes, [k_group % 4] * 4), self.bytes)

    def step(self, builder: Builder, kind: int, total: Value, weights: Value, activations: Value) -> Value:
        low, high = (
            t.call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", self.total, part, rows, activations)
            for part, rows in zip(total, weights, strict=True)
        )
        return low, high

    def finish(self, builder: Builder, kind: int, total: Value) -> Value:
        return t.concatenate(builder, *total)


class GenericDot:
    """Plain IR for any processor, 8 rows: each byte widened and multiplied. Slow; the yardstick for the others."""

    def __init__(self) -> None:
        self.total: Type = t.vector(t.I32, 8)

    def steps(self, kind: int) -> int:
        return _STEPS // WEIGHT_FORMATS[kind].n_scales

    def start(self, builder: Builder, kind: int, activations: Value, sum_offset: Value) -> Value:
        return t.constant(self.total, 0)

    def prepare(self, builder: Builder, kind: int, weights: Value) -> Value:
        columns = [t.shuffle(builder, weights, [4 * row + c for row in range(8)]) for c in range(4)]
        return [builder.sext(column, self.total) for column in columns]

    def broadcast(self, builder: Builder, activations: Value, k_group: int) -> Value:
        each = [t.load(builder, t.I8, t.beyond(builder, activations, 4 * k_group + c), 1) for c in range(4)]
        return [t.splat(builder, builder.sext(byte, t.I32), 8) for byte in each]

    def step(self, builder: Builder, kind: int, total: Value, weights: Value, activations: Value) -> Value:
        for column, activation in zip(weights, activations, strict=True):
            total = builder.add(total, builder.mul(column, activation))
        return total

    def finish(self, builder: Builder, kind: int, total: Value) -> Value:
        return total


@dataclass(frozen=True)
class LinearShapes:
    """The shapes of linear tiles that a processor has registers for.

    ``side``: weight groups side by side. ``best``: tokens of the tile that takes least time per token. ``widest``: as
    many tokens as go through one tile. ``parts``: tokens and groups whose integer sums are in registers at a time, by
    tokens and groups of the tile, where not those of all are.
    """

    side: int
    best: int
    widest: int
    parts: Mapping[tuple[int, int], tuple[int, int]]

    def part(self, n_tokens: int, n_groups: int) -> tuple[int, int]:
        return self.parts.get((n_tokens, n_groups), (n_tokens, n_groups))

    def all(self) -> list[tuple[int, int]]:
        """Tokens and groups of every tile that is used: those of many tokens, and a single token's."""
        return [*((n_tokens, self.side) for n_tokens in range(1, self.widest + 1)), (1, SINGLE_STREAMS)]


@dataclass(frozen=True)
class InstructionSet:
    """One way to emit the kernels.

    ``group_rows``: weight rows per group, one per lane. ``float_lanes``: lanes of a float32 register. ``pin_class``:
    the inline-asm register class for pinning accumulators (ir_tools.pin), None to leave order to LLVM.
    ``attention_rows``: query rows of the large attention tiles.
    """

    name: str
    dot: DotProduct
    group_rows: int
    float_lanes: int
    pin_class: str | None
    linear: LinearShapes
    attention_rows: int

    def add_product(self, builder: Builder, a: Value, b: Value, total: Value) -> Value:
        """fma(a, b, total), computed here and in total's register, where the processor lets us say so."""
        return t.fma_in_place(builder, a, b, total) if self.is_x86 else t.fma(builder, a, b, total)

    @property
    def is_x86(self) -> bool:
        return self.pin_class in {"v", "x"}


_ZMM: Final = LinearShapes(2, 6, 8, {(7, 2): (4, 2), (8, 2): (4, 2)})
_YMM: Final = LinearShapes(1, 4, 6, {(1, 4): (1, 2), (5, 1): (3, 1), (6, 1): (3, 1)})
_NEON: Final = LinearShapes(1, 5, 6, {(6, 1): (3, 1)})

INSTRUCTION_SETS: Final = {
    "avx512vnni": InstructionSet("avx512vnni", Vnni(16), 16, 16, "v", _ZMM, 12),
    "avxvnni": InstructionSet("avxvnni", Vnni(8), 8, 8, "x", _YMM, 3),
    "avx2": InstructionSet("avx2", Avx2(), 8, 8, "x", _YMM, 3),
    "neon-dotprod": InstructionSet("neon-dotprod", NeonDot(), 8, 4, "w", _NEON, 3),
    "generic": InstructionSet("generic", GenericDot(), 8, 8, None, LinearShapes(1, 4, 4, {}), 3),
}

KERNEL_PATH_VARIABLE: Final = "KVFERRY_KERNEL_PATH"


def choose_instruction_set(machine: str, features: set[str]) -> str:
    """The fastest path that a processor with these LLVM feature names runs."""
    if machine in {"x86_64", "AMD64"} and {"avx2", "fma", "f16c"} <= features:
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"} <= features:
            return "avx512vnni"
        return "avxvnni" if "avxvnni" in features else "avx2"
    if machine in ARM_MACHINES and "dotprod" in features:
        return "neon-dotprod"
    return "generic"


def host_instruction_set() -> InstructionSet:
    """The path for this machine, or the one that the environment variable KVFERRY_KERNEL_PATH names."""
    asked = os.environ.get(KERNEL_PATH_VARIABLE)
    if asked is None:
        asked = choose_instruction_set(platform.machine(), host_features())
    if asked not in INSTRUCTION_SETS:
        known = ", ".join(INSTRUCTION_SETS)
        raise ValueError(f"{KERNEL_PATH_VARIABLE}={asked!r} names no kernel path; use one of {known}")
    return INSTRUCTION_SETS[asked]
