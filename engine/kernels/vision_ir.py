"""What a vision tower computes that a decoder does not: layer norm and GELU, over rows of whole blocks of 32 floats."""

from __future__ import annotations

from typing import Final

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.ir_tools import Builder, Value
from kvferry.engine.kernels.layout import QUANT_BLOCK
from kvferry.engine.kernels.vector_ir import BLOCK_FLOATS, exp, load_block, quantise_block, store_block

# GELU by tanh: x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
GELU_FACTOR: Final = 1.5957691216057308  # 2 * sqrt(2 / pi)
GELU_CUBIC: Final = 0.044715

# 1 - erf(z) = (A1 t + ... + A5 t^5) exp(-z^2), t = 1 / (1 + P z), z >= 0: Abramowitz and Stegun 7.1.26, 1.5e-7 off.
ERF_P: Final = 0.3275911
ERF_COEFFICIENTS: Final = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
SQRT_HALF: Final = 0.7071067811865476


def build_layer_norm(
    builder: Builder, x: Value, weight: Value, bias: Value, n_blocks: Value, epsilon: Value, out: Value
) -> None:
    """Layer norm of the row at ``x``: mean and mean square of the differences by 32 running sums, folded in halves;
    element = ((x - mean) * r) * weight + bias. ``out`` may be ``x``."""
    n_elements = builder.sitofp(t.scaled(builder, n_blocks, QUANT_BLOCK), t.F32)
    zero = t.constant(BLOCK_FLOATS, 0.0)
    sums = t.variable(builder, BLOCK_FLOATS, zero, "sums")

    def add(block: Value) -> None:
        builder.store(builder.fadd(t.value_of(builder, sums), load_block(builder, x, block)), sums)

    t.counted_loop(builder, n_blocks, add, "sum")
    mean = builder.fdiv(t.fold_halves(builder, t.value_of(builder, sums), t.add), n_elements)
    means = t.splat(builder, mean, QUANT_BLOCK)
    squares = t.variable(builder, BLOCK_FLOATS, zero, "squares")

    def add_square(block: Value) -> None:
        centred = builder.fsub(load_block(builder, x, block), means)
        builder.store(t.fma(builder, centred, centred, t.value_of(builder, squares)), squares)

    t.counted_loop(builder, n_blocks, add_square, "squares")
    variance = builder.fdiv(t.fold_halves(builder, t.value_of(builder, squares), t.add), n_elements)
    root = t.square_root(builder, builder.fadd(variance, epsilon))
    factor = t.splat(builder, builder.fdiv(t.constant(t.F32, 1.0), root), QUANT_BLOCK)

    def scale(block: Value) -> None:
        values = builder.fmul(builder.fsub(load_block(builder, x, block), means), factor)
        values = builder.fmul(values, load_block(builder, weight, block))
        store_block(builder, builder.fadd(values, load_block(builder, bias, block)), out, block)

    t.counted_loop(builder, n_blocks, scale, "scale")


def build_gelu_tanh(builder: Builder, x: Value, n_blocks: Value) -> None:
    """x / (1 + exp(-(x + (x * x * x) * 0.044715) * 2 sqrt(2 / pi))), in place."""

    def one_block(block: Value) -> None:
        values = load_block(builder, x, block)
        cube = builder.fmul(builder.fmul(values, values), values)
        inner = builder.fadd(values, builder.fmul(cube, t.constant(BLOCK_FLOATS, GELU_CUBIC)))
        inner = builder.fmul(inner, t.constant(BLOCK_FLOATS, GELU_FACTOR))
        below = builder.fadd(t.constant(BLOCK_FLOATS, 1.0), exp(builder, builder.fneg(inner)))
        store_block(builder, builder.fdiv(values, below), x, block)

    t.counted_loop(builder, n_blocks, one_block, "gelu")


def build_gelu_erf(builder: Builder, x: Value, n_blocks: Value) -> None:
    """x times the normal distribution's share below it, in place.

    z = |x| * sqrt(1/2); tail = polynomial(1 / (1 + P z)) * exp(-(z * z)) * 0.5; x * tail below 0, else x * (1 - tail).
    """
    one = t.constant(BLOCK_FLOATS, 1.0)

    def one_block(block: Value) -> None:
        values = load_block(builder, x, block)
        z = builder.fmul(t.absolute(builder, values), t.constant(BLOCK_FLOATS, SQRT_HALF))
        ratio = builder.fdiv(one, t.fma(builder, t.constant(BLOCK_FLOATS, ERF_P), z, one))
        polynomial = t.constant(BLOCK_FLOATS, ERF_COEFFICIENTS[-1])
        for coefficient in reversed(ERF_COEFFICIENTS[:-1]):
            polynomial = t.fma(builder, polynomial, ratio, t.constant(BLOCK_FLOATS, coefficient))
        power = exp(builder, builder.fneg(builder.fmul(z, z)))
        tail = builder.fmul(builder.fmul(builder.fmul(polynomial, ratio), power), t.constant(BLOCK_FLOATS, 0.5))
        is_negative = builder.fcmp_ordered("<", values, t.constant(BLOCK_FLOATS, 0.0))
        share = builder.select(is_negative, tail, builder.fsub(one, tail))
        store_block(builder, builder.fmul(values, share), x, block)

    t.counted_loop(builder, n_blocks, one_block, "gelu")


def build_quantise(builder: Builder, x: Value, n_blocks: Value, row: Value) -> None:
    """Quantise the float row at ``x`` into the activation row at ``row``."""
    t.counted_loop(
        builder, n_blocks, lambda b: quantise_block(builder, load_block(builder, x, b), row, n_blocks, b), "quantise"
    )
