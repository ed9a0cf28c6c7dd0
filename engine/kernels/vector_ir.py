"""Element-wise kernels over rows of float32: exp, SiLU, RMS norm, quantisation, rope.

They work on 32 elements at a time, one <32 x float> value that LLVM cuts into whatever registers the machine has. The
cut cannot be seen: lanes never meet except in ``fold_halves``, whose order is fixed.
"""

from __future__ import annotations

from typing import Final

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.ir_tools import Builder, Type, Value
from kvferry.engine.kernels.layout import FLOAT_BYTES, QUANT_BLOCK

BLOCK_FLOATS: Final = t.float_vector(QUANT_BLOCK)
_BLOCK_BYTES: Final = QUANT_BLOCK * FLOAT_BYTES

# exp(r) = 1 + r + r * r * (C0 + C1 r + ... + C4 r^4) for |r| <= ln(2) / 2: fitted for the smallest relative error in
# 50-digit arithmetic, then rounded to float32; 3.8e-9 off at most, a sixteenth of a float32 half unit.
EXP_COEFFICIENTS: Final = tuple(
    float.fromhex(digits)
    for digits in ("0x1.fffffcp-2", "0x1.555492p-3", "0x1.5558f2p-5", "0x1.1239f2p-7", "0x1.6a2414p-10")
)
LOG2_E: Final = float.fromhex("0x1.715476p+0")
LN2_HIGH: Final = float.fromhex("0x1.62e4p-1")  # 15 bits, so n * LN2_HIGH is exact
LN2_LOW: Final = float.fromhex("0x1.7f7d1cp-20")
EXP_MIN: Final = -87.0  # 2^-126 is still a normal number
EXP_MAX: Final = 88.0
QUANT_MAX: Final = 127.0
# Below this a block of activations counts as zero: 127 / amax must stay finite.
QUANT_SMALLEST: Final = 2.0**-100


def exp(builder: Builder, x: Value) -> Value:
    """e^x for a scalar or a vector, x clamped to [EXP_MIN, EXP_MAX]. exp(0) is exactly 1."""
    kind = x.type
    low, high = t.constant(kind, EXP_MIN), t.constant(kind, EXP_MAX)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    n = t.round_half_even(builder, builder.fmul(x, t.constant(kind, LOG2_E)))
    r = t.fma(builder, n, t.constant(kind, -LN2_HIGH), x)
    r = t.fma(builder, n, t.constant(kind, -LN2_LOW), r)
    polynomial = t.constant(kind, EXP_COEFFICIENTS[-1])
    for coefficient in reversed(EXP_COEFFICIENTS[:-1]):
        polynomial = t.fma(builder, polynomial, r, t.constant(kind, coefficient))
    polynomial = t.fma(builder, polynomial, builder.fmul(r, r), r)
    polynomial = builder.fadd(polynomial, t.constant(kind, 1.0))
    return builder.fmul(polynomial, _power_of_two(builder, n))


def _power_of_two(builder: Builder, n: Value) -> Value:
    """2^n for whole n in [-126, 127], by writing the exponent field."""
    ints: Type = t.vector(t.I32, n.type.count) if hasattr(n.type, "count") else t.I32
    exponent = builder.add(builder.fptosi(n, ints), t.constant(ints, 127))
    return builder.bitcast(builder.shl(exponent, t.constant(ints, 23)), n.type)


def silu(builder: Builder, x: Value) -> Value:
    """x / (1 + exp(-x))."""
    return builder.fdiv(x, builder.fadd(t.constant(x.type, 1.0), exp(builder, builder.fneg(x))))


def load_block(builder: Builder, address: Value, block: Value) -> Value:
    return t.load(builder, BLOCK_FLOATS, t.at(builder, address, t.scaled(builder, block, _BLOCK_BYTES)))


def store_block(builder: Builder, value: Value, address: Value, block: Value) -> None:
    t.store(builder, value, t.at(builder, address, t.scaled(builder, block, _BLOCK_BYTES)))


def quantise_block(builder: Builder, x: Value, row: Value, n_blocks: Value, block: Value) -> None:
    """Quantise 32 floats into block ``block`` of the activation row at ``row`` (layout.py).

    s = amax / 127, q = round_half_even(x * (127 / amax)); a block whose amax is below 2^-100 is all zero with s = 0.
    """
    amax = t.fold_halves(builder, t.absolute(builder, x), t.larger)
    top = t.constant(t.F32, QUANT_MAX)
    zero = t.constant(t.F32, 0.0)
    counts = builder.fcmp_ordered(">", amax, t.constant(t.F32, QUANT_SMALLEST))
    scale = builder.select(counts, builder.fdiv(amax, top), zero)
    inverse = builder.select(counts, builder.fdiv(top, amax), zero)
    rounded = t.round_half_even(builder, builder.fmul(x, t.splat(builder, inverse, QUANT_BLOCK)))
    integers = builder.fptosi(rounded, t.vector(t.I32, QUANT_BLOCK))
    values = t.at(builder, row, t.scaled(builder, block, QUANT_BLOCK))
    t.store(builder, builder.trunc(integers, t.vector(t.I8, QUANT_BLOCK)), values, 1)
    total = t.call(builder, f"llvm.vector.reduce.add.v{QUANT_BLOCK}i32", t.I32, integers)
    scales = t.at(builder, row, builder.add(t.scaled(builder, n_blocks, QUANT_BLOCK), t.scaled(builder, block, 8)))
    t.store(builder, scale, scales)
    t.store(builder, builder.fmul(scale, builder.sitofp(total, t.F32)), t.beyond(builder, scales, 4))
    offsets = builder.add(t.scaled(builder, n_blocks, QUANT_BLOCK + 8), t.scaled(builder, block, 4))
    t.store(builder, builder.mul(total, t.int_constant(-128, t.I32)), t.at(builder, row, offsets))


def _norm_factor(builder: Builder, x: Value, n_blocks: Value, epsilon: Value) -> Value:
    """1 / sqrt(sum of squares / n + epsilon) of a float row, in every lane of a block.

    The squares go into 32 running sums (element index modulo 32) that are folded in halves.
    """
    total = _dot(builder, x, x, n_blocks)
    n_elements = builder.sitofp(t.scaled(builder, n_blocks, QUANT_BLOCK), t.F32)
    root = t.square_root(builder, builder.fadd(builder.fdiv(total, n_elements), epsilon))
    return t.splat(builder, builder.fdiv(t.constant(t.F32, 1.0), root), QUANT_BLOCK)


def _dot(builder: Builder, x: Value, y: Value, n_blocks: Value) -> Value:
    """Dot product of two float rows: 32 running sums by fma (element index modulo 32), folded in halves."""
    sums = t.variable(builder, BLOCK_FLOATS, t.constant(BLOCK_FLOATS, 0.0), "sums")

    def one_block(block: Value) -> None:
        left, right = load_block(builder, x, block), load_block(builder, y, block)
        builder.store(t.fma(builder, left, right, t.value_of(builder, sums)), sums)

    t.counted_loop(builder, n_blocks, one_block, "dot")
    return t.fold_halves(builder, t.value_of(builder, sums), t.add)


def build_dot(builder: Builder, x: Value, y: Value, n_blocks: Value) -> Value:
    """The float dot product that a router takes (docs/numerics.md, "Experts")."""
    return _dot(builder, x, y, n_blocks)


def build_norm(builder: Builder, x: Value, weight: Value, n_blocks: Value, epsilon: Value, out: Value) -> None:
    """RMS norm of the float row at ``x`` times ``weight``, as floats at ``out`` (which may be ``x``)."""
    factor = _norm_factor(builder, x, n_blocks, epsilon)

    def scale(block: Value) -> None:
        values = builder.fmul(load_block(builder, x, block), factor)
        store_block(builder, builder.fmul(values, load_block(builder, weight, block)), out, block)

    t.counted_loop(builder, n_blocks, scale, "scale")


def build_norm_quantise(builder: Builder, x: Value, weight: Value, n_blocks: Value, epsilon: Value, row: Value) -> None:
    """RMS norm of the float row at ``x`` times ``weight``, quantised into the activation row at ``row``.

    r = 1 / sqrt(sum / n + epsilon); element = (x * r) * weight.
    """
    factor = _norm_factor(builder, x, n_blocks, epsilon)

    def scale_and_quantise(block: Value) -> None:
        values = builder.fmul(load_block(builder, x, block), factor)
        values = builder.fmul(values, load_block(builder, weight, block))
        quantise_block(builder, values, row, n_blocks, block)

    t.counted_loop(builder, n_blocks, scale_and_quantise, "quantise")


def build_add(builder: Builder, target: Value, source: Value, n_blocks: Value) -> None:
    """target += source, float rows."""

    def one_block(block: Value) -> None:
        total = builder.fadd(load_block(builder, target, block), load_block(builder, source, block))
        store_block(builder, total, target, block)

    t.counted_loop(builder, n_blocks, one_block, "add")


def build_add_scaled(builder: Builder, target: Value, source: Value, factor: Value, n_blocks: Value) -> None:
    """target = fma(factor, source, target), float rows."""
    factors = t.splat(builder, factor, QUANT_BLOCK)

    def one_block(block: Value) -> None:
        total = t.fma(builder, factors, load_block(builder, source, block), load_block(builder, target, block))
        store_block(builder, total, target, block)

    t.counted_loop(builder, n_blocks, one_block, "add")


def build_gated_quantise(builder: Builder, gate: Value, up: Value, row: Value, n_blocks: Value, block: Value) -> None:
    """silu(gate) * up for the 32 floats at each address, quantised into block ``block`` of the row at ``row``."""
    first = t.int_constant(0)
    gated = builder.fmul(silu(builder, load_block(builder, gate, first)), load_block(builder, up, first))
    quantise_block(builder, gated, row, n_blocks, block)


def build_rope(builder: Builder, x: Value, table: Value, half: Value, scale: Value, out: Value) -> None:
    """Turn one head of 2 * ``half`` floats by its position's angles and multiply by ``scale``.

    Pairs are (i, i + half). ``table`` holds cos[half] then sin[half] of the position. ``half`` is a multiple of 8.
    low' = (low * cos - high * sin) * scale; high' = (high * cos + low * sin) * scale; every operation rounds.
    """
    lanes = 8
    kind = t.float_vector(lanes)
    half_bytes = t.scaled(builder, half, FLOAT_BYTES)
    factor = t.splat(builder, scale, lanes)

    def eight_pairs(step: Value) -> None:
        offset = t.scaled(builder, step, lanes * FLOAT_BYTES)
        offset_high = builder.add(offset, half_bytes)
        low, high = (
            t.load(builder, kind, t.at(builder, x, offset)),
            t.load(builder, kind, t.at(builder, x, offset_high)),
        )
        cos = t.load(builder, kind, t.at(builder, table, offset))
        sin = t.load(builder, kind, t.at(builder, table, offset_high))
        new_low = builder.fsub(builder.fmul(low, cos), builder.fmul(high, sin))
        new_high = builder.fadd(builder.fmul(high, cos), builder.fmul(low, sin))
        t.store(builder, builder.fmul(new_low, factor), t.at(builder, out, offset))
        t.store(builder, builder.fmul(new_high, factor), t.at(builder, out, offset_high))

    t.counted_loop(builder, builder.sdiv(half, t.int_constant(lanes)), eight_pairs, "pairs")
