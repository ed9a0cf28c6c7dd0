"""Attention over one KV block of 32 positions, for a tile of query rows.

A query row is one head of one token. For each block, in order of position, a row takes three steps: scores (q . k, d
ascending), the online softmax's step, and the weighted sum of values (position ascending). The steps of a row depend on
its own position alone; how many rows share a tile cannot be seen in the result. Positions beyond a row's own never
touch an accumulator: the rows there may be stale, infinite or not numbers.

While a K or V tile is worked on, the next block's is asked for, a little with every dimension or position: blocks lie
far apart in memory, so the processor cannot guess where the next one is.
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
RESCALE_LANES: Final = 16
_SCORES: Final = t.float_vector(KV_BLOCK)
_SCORE_ROW_BYTES: Final = KV_BLOCK * FLOAT_BYTES
_VALUE_CHUNK: Final = 32  # elements of a head that one pass over the block's positions covers


def build_scores(
    builder: Builder,
    isa: InstructionSet,
    n_rows: int,
    q: Value,
    head_dim: Value,
    k_tile: Value,
    scores: Value,
    ahead: Value,
    ahead_step: Value,
) -> None:
    """scores[row, position] = sum over d of q[row, d] * k[d, position], by fma from +0, d ascending.

    ``q`` float32 [n_rows, head_dim] (already scaled), ``k_tile`` [head_dim, 32], ``scores`` [n_rows, 32]. ``ahead``:
    the next block's K as it is stored, ``ahead_step`` bytes for a dimension.
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
        _ask_for(builder, builder.add(ahead, builder.mul(d, ahead_step)), ahead_step)
        _outer_product(builder, q_pointers, k_pointers, sums)

    t.counted_loop(builder, head_dim, one_dimension, "dimension")
    for row in range(n_rows):
        for r in registers:
            target = t.at(builder, scores, row * _SCORE_ROW_BYTES + r * lanes * FLOAT_BYTES)
            t.store(builder, t.value_of(builder, sums[row][r]), target)


def _ask_for(builder: Builder, address: Value, n_bytes: Value) -> None:
    """Prefetch the ``n_bytes`` at an address, which are at most two cache lines."""
    t.prefetch(builder, t.at(builder, address))
    t.prefetch(builder, t.at(builder, address, builder.ashr(n_bytes, t.int_constant(1))))


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


def build_row_maximum(builder: Builder, n_valid: Value, scores: Value, old: Value, new: Value) -> None:
    """new = the larger of ``old`` and the largest of one row's first ``n_valid`` (at most 32) scores."""
    scores_now = t.constant(_SCORES, LOWEST_SCORE)
    scores_now = builder.select(_valid(builder, n_valid), load_block(builder, scores, t.int_constant(0)), scores_now)
    largest = t.fold_halves(builder, scores_now, t.larger)
    t.store(builder, t.larger(builder, largest, t.load(builder, t.F32, t.at(builder, old))), t.at(builder, new))


def build_rescales(builder: Builder, n_rows: Value, maxima: Value, rescales: Value) -> None:
    """With m the maximum of a row so far (``maxima``) and m' the one after this block (``rescales``): rescales =
    exp(m - m'), which is exactly 1 when m does not rise, and maxima = m'.

    The rows are taken ``RESCALE_LANES`` at a time: both arrays have room for as many beyond their last row.
    """
    kind = t.float_vector(RESCALE_LANES)

    def some_rows(step: Value) -> None:
        offset = t.scaled(builder, step, RESCALE_LANES * FLOAT_BYTES)
        old, new = (t.load(builder, kind, t.at(builder, array, offset)) for array in (maxima, rescales))
        t.store(builder, exp(builder, builder.fsub(old, new)), t.at(builder, rescales, offset))
        t.store(builder, new, t.at(builder, maxima, offset))

    n_steps = builder.add(n_rows, t.int_constant(RESCALE_LANES - 1))
    t.counted_loop(builder, builder.sdiv(n_steps, t.int_constant(RESCALE_LANES)), some_rows, "rescale")


def build_row_weights(
    builder: Builder, n_valid: Value, scores: Value, maximum: Value, rescale: Value, sums: Value
) -> None:
    """Turn one row's 32 scores into weights: exp(score - maximum), 0 beyond the first ``n_valid``.

    sums[lane] = fma(sums[lane], rescale, weight[lane]); ``scores`` and ``sums`` are float32 [32].
    """
    first = t.int_constant(0)
    limit = t.load_splat(builder, t.at(builder, maximum), KV_BLOCK)
    weights = exp(builder, builder.fsub(load_block(builder, scores, first), limit))
    weights = builder.select(_valid(builder, n_valid), weights, t.constant(_SCORES, 0.0))
    factor = t.load_splat(builder, t.at(builder, rescale), KV_BLOCK)
    total = t.fma(builder, load_block(builder, sums, first), factor, weights)
    store_block(builder, weights, scores, first)
    store_block(builder, total, sums, first)


def _valid(builder: Builder, n_valid: Value) -> Value:
    """For each lane of a block whether it is among the first ``n_valid``."""
    limit = t.splat(builder, builder.trunc(n_valid, t.I32), KV_BLOCK)
    return builder.icmp_signed("<", t.index_vector(list(range(KV_BLOCK))), limit)


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
    ahead: Value,
    ahead_step: Value,
) -> None:
    """output[row] = output[row] * rescale[row], then fma(weights[row, i], v[i], output[row]) for i < n_valid ascending.

    ``weights`` float32 [n_rows, 32], ``v_tile`` [32, head_dim], ``rescale`` [n_rows], ``output`` [n_rows, head_dim].
    ``ahead``: the next block's V as it is stored, ``ahead_step`` bytes for 32 elements.
    """
    lanes = isa.float_lanes
    kind = t.float_vector(lanes)
    registers = range(_VALUE_CHUNK // lanes)
    row_bytes = t.scaled(builder, head_dim, FLOAT_BYTES)
    n_chunks = builder.sdiv(head_dim, t.int_constant(_VALUE_CHUNK))
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
            in_tile = builder.add(t.scaled(builder, chunk, KV_BLOCK), position)
            _ask_for(builder, builder.add(ahead, builder.mul(in_tile, ahead_step)), ahead_step)
            _outer_product(builder, w_pointers, v_pointers, sums)

        t.counted_loop(builder, n_valid, one_position, "position")
        for row, target in enumerate(targets):
            for r in registers:
                value = t.value_of(builder, sums[row][r])
                t.store(builder, value, t.beyond(builder, target, r * lanes * FLOAT_BYTES))

    t.counted_loop(builder, n_chunks, one_chunk, "chunk")


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
