"""Attention over one KV block of 32 positions, for a tile of query rows.

A query row is one head of one token. For each block, in order of position, a row takes three steps: scores (q . k, d
ascending), the online softmax's step, and the weighted sum of values (position ascending). The steps of a row depend on
its own position alone; how many rows share a tile cannot be seen in the result. Positions beyond a row's own never
touch an accumulator: the rows there may be stale, infinite or not numbers.
"""

from __future__ import annotations

from typing import Final

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.instruction_sets import InstructionSet
from kvferry.engine.kernels.ir_tools import Builder, Value
from kvferry.engine.kernels.layout import FLOAT_BYTES, KV_BLOCK
from kvferry.engine.kernels.vector_ir import exp, load_block, quantise_block, store_block

# A row's maximum before its first block, and what a masked score counts as. Far below any real score.
LOWEST_SCORE: Final = -3.0e38
_SCORE_ROW_BYTES: Final = KV_BLOCK * FLOAT_BYTES
_VALUE_CHUNK: Final = 32  # elements of a head that one pass over the block's positions covers


def build_scores(
    builder: Builder, isa: InstructionSet, n_rows: int, q: Value, head_dim: Value, k_tile: Value, scores: Value
) -> None:
    """scores[row, position] = sum over d of q[row, d] * k[d, position], by fma from +0, d ascending.

    ``q`` float32 [n_rows, head_dim] (already scaled), ``k_tile`` [head_dim, 32], ``scores`` [n_rows, 32].
    """
    lanes = isa.float_lanes
    kind = t.float_vector(lanes)
    registers = range(KV_BLOCK // lanes)
    q_stride = t.scaled(builder, head_dim, FLOAT_BYTES)
    q_rows = [builder.add(q, t.scaled(builder, q_stride, row)) for row in range(n_rows)]
    sums = [[t.variable(builder, kind, t.constant(kind, 0.0), "score") for _ in registers] for _ in q_rows]

    def one_dimension(d: Value) -> None:
        k_pointer = t.at(builder, k_tile, t.scaled(builder, d, KV_BLOCK * FLOAT_BYTES))
        offset = t.scaled(builder, d, FLOAT_BYTES)
        q_pointers = [t.at(builder, row, offset) for row in q_rows]
        k_pointers = [t.beyond(builder, k_pointer, r * lanes * FLOAT_BYTES) for r in registers]
        _outer_product(builder, q_pointers, k_pointers, sums)

    t.counted_loop(builder, head_dim, one_dimension, "dimension")
    for row in range(n_rows):
        for r in registers:
            target = t.at(builder, scores, row * _SCORE_ROW_BYTES + r * lanes * FLOAT_BYTES)
            t.store(builder, t.value_of(builder, sums[row][r]), target)


def _outer_product(builder: Builder, rows: list[Value], columns: list[Value], sums: list[list[Value]]) -> None:
    """sums[row][column] = fma(float at rows[row], vector at columns[column], sums[row][column]).

    The shorter side stays in registers while the longer one passes by, a value at a time: loading both sides first
    would leave too few registers for the sums.
    """
    kind = sums[0][0].allocated_type

    def update(row: int, column: int, scalar: Value, values: Value) -> None:
        slot = sums[row][column]
        builder.store(t.fma(builder, scalar, values, t.value_of(builder, slot)), slot)

    if len(rows) <= len(columns):
        scalars = [t.load_splat(builder, pointer, kind.count) for pointer in rows]
        for column, pointer in enumerate(columns):
            values = t.load(builder, kind, pointer)
            for row, scalar in enumerate(scalars):
                update(row, column, scalar, values)
            t.keep_order(builder)
    else:
        vectors = [t.load(builder, kind, pointer) for pointer in columns]
        for row, pointer in enumerate(rows):
            scalar = t.load_splat(builder, pointer, kind.count)
            for column, values in enumerate(vectors):
                update(row, column, scalar, values)
            t.keep_order(builder)


def build_softmax_step(
    builder: Builder, n_valid: Value, scores: Value, maximum: Value, rescale: Value, sums: Value
) -> None:
    """Turn one row's 32 scores into weights relative to the running maximum.

    With m the maximum so far and m' the one after this block: rescale = exp(m - m'), which is exactly 1 when m does not
    rise; weight = exp(score - m'), 0 beyond the first ``n_valid``; sums[lane] = fma(sums[lane], rescale, weight[lane]).
    ``scores`` [32] is overwritten; ``maximum`` and ``rescale`` are one float32, ``sums`` is float32 [32].
    """
    first = t.int_constant(0)
    lane_index = t.index_vector(list(range(KV_BLOCK)))
    limit = t.splat(builder, builder.trunc(n_valid, t.I32), KV_BLOCK)
    valid = builder.icmp_signed("<", lane_index, limit)
    floats = t.float_vector(KV_BLOCK)
    values = builder.select(valid, load_block(builder, scores, first), t.constant(floats, LOWEST_SCORE))
    old = t.load(builder, t.F32, t.at(builder, maximum))
    new = t.larger(builder, t.fold_halves(builder, values, t.larger), old)
    factor = exp(builder, builder.fsub(old, new))
    weights = exp(builder, builder.fsub(values, t.splat(builder, new, KV_BLOCK)))
    weights = builder.select(valid, weights, t.constant(floats, 0.0))
    total = t.fma(builder, load_block(builder, sums, first), t.splat(builder, factor, KV_BLOCK), weights)
    store_block(builder, weights, scores, first)
    store_block(builder, total, sums, first)
    t.store(builder, new, t.at(builder, maximum))
    t.store(builder, factor, t.at(builder, rescale))


def build_weighted_values(
    builder: Builder,
    isa: InstructionSet,
    n_rows: int,
    weights: Value,
    n_valid: Value,
    v_tile: Value,
    head_dim: Value,
    rescale: Value,
    output: Value,
) -> None:
    """output[row] = output[row] * rescale[row], then fma(weights[row, i], v[i], output[row]) for i < n_valid ascending.

    ``weights`` float32 [n_rows, 32], ``v_tile`` [32, head_dim], ``rescale`` [n_rows], ``output`` [n_rows, head_dim].
    """
    lanes = isa.float_lanes
    kind = t.float_vector(lanes)
    registers = range(_VALUE_CHUNK // lanes)
    row_bytes = t.scaled(builder, head_dim, FLOAT_BYTES)
    outputs = [builder.add(output, t.scaled(builder, row_bytes, row)) for row in range(n_rows)]

    def one_chunk(chunk: Value) -> None:
        offset = t.scaled(builder, chunk, _VALUE_CHUNK * FLOAT_BYTES)
        targets = [t.at(builder, row, offset) for row in outputs]
        sums = []
        for row, target in enumerate(targets):
            factor = t.load_splat(builder, t.at(builder, rescale, row * FLOAT_BYTES), lanes)
            old = [t.load(builder, kind, t.beyond(builder, target, r * lanes * FLOAT_BYTES)) for r in registers]
            sums.append([t.variable(builder, kind, builder.fmul(value, factor), "output") for value in old])

        def one_position(position: Value) -> None:
            v_pointer = t.at(builder, v_tile, builder.add(offset, builder.mul(position, row_bytes)))
            w_pointer = t.at(builder, weights, t.scaled(builder, position, FLOAT_BYTES))
            w_pointers = [t.beyond(builder, w_pointer, row * _SCORE_ROW_BYTES) for row in range(n_rows)]
            v_pointers = [t.beyond(builder, v_pointer, r * lanes * FLOAT_BYTES) for r in registers]
            _outer_product(builder, w_pointers, v_pointers, sums)

        t.counted_loop(builder, n_valid, one_position, "position")
        for row, target in enumerate(targets):
            for r in registers:
                value = t.value_of(builder, sums[row][r])
                t.store(builder, value, t.beyond(builder, target, r * lanes * FLOAT_BYTES))

    t.counted_loop(builder, builder.sdiv(head_dim, t.int_constant(_VALUE_CHUNK)), one_chunk, "chunk")


def build_attention_output(
    builder: Builder,
    output: Value,
    head_blocks: Value,
    sums: Value,
    row: Value,
    n_blocks: Value,
    first_block: Value,
) -> None:
    """Divide a query row by its sum of weights and quantise it into blocks of an activation row.

    The 32 ``sums`` are folded in halves; element = output * (1 / sum). ``head_blocks`` = head_dim / 32; the head's
    first block in the activation row at ``row`` (of ``n_blocks`` blocks) is ``first_block``.
    """
    total = t.fold_halves(builder, load_block(builder, sums, t.int_constant(0)), t.add)
    inverse = t.splat(builder, builder.fdiv(t.constant(t.F32, 1.0), total), KV_BLOCK)

    def one_block(block: Value) -> None:
        values = builder.fmul(load_block(builder, output, block), inverse)
        quantise_block(builder, values, row, n_blocks, builder.add(first_block, block))

    t.counted_loop(builder, head_blocks, one_block, "head_block")
