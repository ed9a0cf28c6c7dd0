"""K and V rows on their way into the cache and out of it, for the kinds that are narrower than float32.

Attention reads float32 tiles. A narrow tile is widened into one just before it is read; what a stored row means is
therefore a float32 row that depends on the stored bytes alone (docs/numerics.md, "KV kinds").
"""

from __future__ import annotations

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.ir_tools import Builder, Value
from kvferry.engine.kernels.layout import FLOAT_BYTES, HALF_BYTES, KV_BLOCK, QUANT_BLOCK
from kvferry.engine.kernels.vector_ir import BLOCK_FLOATS, QUANT_MAX, QUANT_SMALLEST, load_block, store_block

_HALVES = t.vector(t.F16, QUANT_BLOCK)
_BYTES = t.vector(t.I8, QUANT_BLOCK)
_INTS = t.vector(t.I32, QUANT_BLOCK)


def build_head_to_half(builder: Builder, head: Value, n_blocks: Value, out: Value) -> None:
    """32 * ``n_blocks`` float32 rounded to float16, to nearest even."""

    def one_block(block: Value) -> None:
        halves = builder.fptrunc(load_block(builder, head, block), _HALVES)
        t.store(builder, halves, t.at(builder, out, t.scaled(builder, block, QUANT_BLOCK * HALF_BYTES)), HALF_BYTES)

    t.counted_loop(builder, n_blocks, one_block, "to_half")


def build_head_to_q8(builder: Builder, head: Value, n_blocks: Value, out: Value, scale_out: Value) -> None:
    """One head's 32 * ``n_blocks`` float32 as int8 with one scale.

    scale = amax / 127, q = round_half_even(x * (127 / amax)); zeros with scale 0 when amax is at most 2^-100.
    """
    largest = t.variable(builder, BLOCK_FLOATS, t.constant(BLOCK_FLOATS, 0.0), "largest")

    def look(block: Value) -> None:
        values = t.absolute(builder, load_block(builder, head, block))
        builder.store(t.larger(builder, values, t.value_of(builder, largest)), largest)

    t.counted_loop(builder, n_blocks, look, "largest")
    amax = t.fold_halves(builder, t.value_of(builder, largest), t.larger)
    top, zero = t.constant(t.F32, QUANT_MAX), t.constant(t.F32, 0.0)
    counts = builder.fcmp_ordered(">", amax, t.constant(t.F32, QUANT_SMALLEST))
    t.store(builder, builder.select(counts, builder.fdiv(amax, top), zero), t.at(builder, scale_out))
    inverse = t.splat(builder, builder.select(counts, builder.fdiv(top, amax), zero), QUANT_BLOCK)

    def quantise(block: Value) -> None:
        rounded = t.round_half_even(builder, builder.fmul(load_block(builder, head, block), inverse))
        integers = builder.trunc(builder.fptosi(rounded, _INTS), _BYTES)
        t.store(builder, integers, t.at(builder, out, t.scaled(builder, block, QUANT_BLOCK)), 1)

    t.counted_loop(builder, n_blocks, quantise, "quantise")


def build_widen_half(builder: Builder, source: Value, n_blocks: Value, out: Value) -> None:
    """32 * ``n_blocks`` float16 as float32, which is exact."""

    def one_block(block: Value) -> None:
        offset = t.scaled(builder, block, QUANT_BLOCK * HALF_BYTES)
        halves = t.load(builder, _HALVES, t.at(builder, source, offset), HALF_BYTES)
        store_block(builder, builder.fpext(halves, BLOCK_FLOATS), out, block)

    t.counted_loop(builder, n_blocks, one_block, "from_half")


def build_widen_q8_keys(builder: Builder, source: Value, head_dim: Value, out: Value) -> None:
    """A q8 K tile as float32 [head_dim, 32]: float(q) * scale of the column's position."""
    scales = load_block(builder, builder.add(source, t.scaled(builder, head_dim, KV_BLOCK)), t.int_constant(0))

    def one_dimension(d: Value) -> None:
        store_block(builder, builder.fmul(_integers(builder, source, d), scales), out, d)

    t.counted_loop(builder, head_dim, one_dimension, "q8_keys")


def build_widen_q8_values(builder: Builder, source: Value, head_dim: Value, out: Value) -> None:
    """A q8 V tile as float32 [32, head_dim]: float(q) * scale of the row's position."""
    scales = builder.add(source, t.scaled(builder, head_dim, KV_BLOCK))
    blocks = builder.sdiv(head_dim, t.int_constant(QUANT_BLOCK))

    def one_position(position: Value) -> None:
        pointer = t.at(builder, scales, t.scaled(builder, position, FLOAT_BYTES))
        scale = t.load_splat(builder, pointer, QUANT_BLOCK)

        def one_block(i: Value) -> None:
            block = builder.add(builder.mul(position, blocks), i)
            store_block(builder, builder.fmul(_integers(builder, source, block), scale), out, block)

        t.counted_loop(builder, blocks, one_block, "q8_block")

    t.counted_loop(builder, t.int_constant(KV_BLOCK), one_position, "q8_values")


def _integers(builder: Builder, source: Value, block: Value) -> Value:
    """32 int8 as float32."""
    bytes_ = t.load(builder, _BYTES, t.at(builder, source, t.scaled(builder, block, QUANT_BLOCK)), 1)
    return builder.sitofp(builder.sext(bytes_, _INTS), BLOCK_FLOATS)
