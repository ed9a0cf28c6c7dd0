"""The linear tile: T tokens times G weight groups, the kernel that nearly all time is spent in.

Definition (docs/numerics.md, "linear"): an output element starts at +0 and takes, block by block of 32 k in order,
``acc = fma(float(dot) * s, d, acc)`` and, for weights with a minimum, ``acc = fma(m, s * sum, acc)``; dot is the exact
integer dot product of the block. Weights with a d for each half of a block take the first line for each half. Every
lane is one output, so the tile's shape cannot be seen in the result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.instruction_sets import InstructionSet
from kvferry.engine.kernels.ir_tools import Builder, Value
from kvferry.engine.kernels.layout import (
    CACHE_LINE,
    FLOAT_BYTES,
    HALF_BYTES,
    QUANT_BLOCK,
    WEIGHT_FORMATS,
    weight_block_bytes,
)

_K_GROUPS = QUANT_BLOCK // 4  # a dot instruction takes 4 consecutive k at a time


@dataclass(frozen=True)
class LinearTile:
    """What is fixed when a tile is compiled: weight kind, tokens T, groups G side by side; and of how many tokens
    and groups the integer sums are in registers at a time, beside the float sums of all.
    """

    kind: int
    n_tokens: int
    n_groups: int
    part_tokens: int
    part_groups: int


@dataclass(frozen=True)
class LinearOperands:
    """The tile's operands, all i64; addresses and strides in bytes.

    ``weights``: first group's first block, the next group ``group_stride`` further. ``activations``: first token's
    quantised row, the next ``activation_stride`` further. ``output``: float32 of the first token and group; next token
    ``output_stride``, next group ``output_group_stride`` further. ``accumulate``: 0 stores the sums, 1 adds them to
    what ``output`` holds (the residual stream). ``ahead``: how far beyond each block that is read memory is asked for
    the first of ``n_ahead`` cache lines.
    """

    weights: Value
    group_stride: Value
    n_blocks: Value
    activations: Value
    activation_stride: Value
    output: Value
    output_stride: Value
    output_group_stride: Value
    accumulate: Value
    ahead: Value
    n_ahead: Value


N_OPERANDS: Final = len(fields(LinearOperands))


def linear_tile(isa: InstructionSet, kind: int, n_tokens: int, n_groups: int) -> LinearTile:
    return LinearTile(kind, n_tokens, n_groups, *isa.linear.part(n_tokens, n_groups))


def build_linear_tile(builder: Builder, isa: InstructionSet, tile: LinearTile, operands: LinearOperands) -> None:
    lanes = isa.group_rows
    floats = t.float_vector(lanes)
    form = WEIGHT_FORMATS[tile.kind]
    block_bytes = weight_block_bytes(tile.kind, lanes)
    sums = [
        [t.variable(builder, floats, t.constant(floats, 0.0), "sum") for _ in range(tile.n_tokens)]
        for _ in range(tile.n_groups)
    ]
    group_addresses = _addresses(builder, operands.weights, operands.group_stride, tile.n_groups)
    token_addresses = _addresses(builder, operands.activations, operands.activation_stride, tile.n_tokens)
    scales_at = t.scaled(builder, operands.n_blocks, QUANT_BLOCK)
    offsets_at = t.scaled(builder, operands.n_blocks, QUANT_BLOCK + 8)

    def one_block(block: Value) -> None:
        weight_offset = t.scaled(builder, block, block_bytes)
        weights = [t.at(builder, address, weight_offset) for address in group_addresses]
        value_offset = t.scaled(builder, block, QUANT_BLOCK)
        values = [t.at(builder, address, value_offset) for address in token_addresses]
        scale_offset = builder.add(scales_at, t.scaled(builder, block, 8))
        scales = [t.at(builder, address, scale_offset) for address in token_addresses]
        sum_offset = builder.add(offsets_at, t.scaled(builder, block, 4))
        sum_offsets = [t.at(builder, address, sum_offset) for address in token_addresses]
        _ask_ahead(builder, operands, weights)
        for n in range(0, tile.n_tokens, tile.part_tokens):
            tokens = range(n, min(n + tile.part_tokens, tile.n_tokens))
            for g in range(0, tile.n_groups, tile.part_groups):
                groups = range(g, min(g + tile.part_groups, tile.n_groups))
                for scale in range(form.n_scales):
                    add_part(scale, tokens, groups, weights, values, scales, sum_offsets)

    def add_part(
        index: int,
        tokens: range,
        groups: range,
        weights: list[Value],
        values: list[Value],
        scales: list[Value],
        sum_offsets: list[Value],
    ) -> None:
        """The part's share of a block that has scale number ``index``."""
        dots = _dots(
            builder,
            isa,
            tile.kind,
            index,
            [weights[g] for g in groups],
            [values[n] for n in tokens],
            [sum_offsets[n] for n in tokens],
        )
        for g, row in zip(groups, dots, strict=True):
            d, m = (_load_scales(builder, tile.kind, lanes, weights[g], i) for i in (index, form.n_scales))
            for n, exact in zip(tokens, row, strict=True):
                dot = builder.fmul(builder.sitofp(exact, floats), t.load_splat(builder, scales[n], lanes))
                total = isa.add_product(builder, dot, d, t.value_of(builder, sums[g][n]))
                if m is not None and index == form.n_scales - 1:
                    scaled_sum = t.load_splat(builder, t.beyond(builder, scales[n], 4), lanes)
                    total = t.fma(builder, m, scaled_sum, total)
                builder.store(total, sums[g][n])

    t.counted_loop(builder, operands.n_blocks, one_block, "block")
    _store_sums(builder, operands, sums)


def _ask_ahead(builder: Builder, operands: LinearOperands, weights: list[Value]) -> None:
    def one_line(line: Value) -> None:
        offset = builder.add(operands.ahead, t.scaled(builder, line, CACHE_LINE))
        for group in weights:
            t.prefetch(builder, builder.gep(group, [offset], source_etype=t.I8))

    t.counted_loop(builder, operands.n_ahead, one_line, "ahead")


def _dots(
    builder: Builder,
    isa: InstructionSet,
    kind: int,
    index: int,
    weights: list[Value],
    values: list[Value],
    sum_offsets: list[Value],
) -> list[list[Value]]:
    """The integer dot products <R x i32> of the part of a block that has its scale number ``index``, [group][token]."""
    k_groups = _K_GROUPS // WEIGHT_FORMATS[kind].n_scales
    steps = isa.dot.steps(kind)
    dots: list[list[Value]] = []
    for first in range(index * k_groups, (index + 1) * k_groups, steps):
        more = _few_dots(builder, isa, kind, range(first, first + steps), weights, values, sum_offsets)
        if dots:
            more = [
                [builder.add(a, b) for a, b in zip(one, other, strict=True)]
                for one, other in zip(dots, more, strict=True)
            ]
        dots = more
    return dots


def _few_dots(
    builder: Builder,
    isa: InstructionSet,
    kind: int,
    k_groups: range,
    weights: list[Value],
    values: list[Value],
    sum_offsets: list[Value],
) -> list[list[Value]]:
    """Those of as many k-groups as one accumulator takes."""
    dot, lanes = isa.dot, isa.group_rows
    vector_bytes = 4 * lanes
    bytes_type = t.vector(t.I8, vector_bytes)
    starts = [
        dot.start(builder, kind, t.beyond(builder, value, 4 * k_groups.start), sum_offset)
        for value, sum_offset in zip(values, sum_offsets, strict=True)
    ]
    totals = [list(starts) for _ in weights]

    def one_k_group(k_group: int, vectors: list[Value]) -> None:
        prepared = [dot.prepare(builder, kind, v) for v in vectors]
        for n in range(len(values)):
            activations = dot.broadcast(builder, values[n], k_group)
            for g in range(len(weights)):
                totals[g][n] = dot.step(builder, kind, totals[g][n], prepared[g], activations)
        if isa.pin_class:
            for g in range(len(weights)):
                totals[g] = [t.pin(builder, total, isa.pin_class) for total in totals[g]]

    def load(vector: int) -> list[Value]:
        return [t.load(builder, bytes_type, t.beyond(builder, w, vector_bytes * vector), 1) for w in weights]

    if WEIGHT_FORMATS[kind].nibbles:
        for j in range(_K_GROUPS // 2):
            raw = load(j)
            one_k_group(j, [builder.and_(r, t.constant(bytes_type, 15)) for r in raw])
            one_k_group(j + _K_GROUPS // 2, [builder.lshr(r, t.constant(bytes_type, 4)) for r in raw])
    else:
        for k_group in k_groups:
            one_k_group(k_group, load(k_group))
    return [[dot.finish(builder, kind, total) for total in row] for row in totals]


def _store_sums(builder: Builder, operands: LinearOperands, sums: list[list[Value]]) -> None:
    """Write the tile, or add it to what is there; one branch per tile, not per element."""
    n_groups, n_tokens = len(sums), len(sums[0])
    rows = _addresses(builder, operands.output, operands.output_stride, n_tokens)
    targets = [_addresses(builder, row, operands.output_group_stride, n_groups) for row in rows]
    kind = sums[0][0].allocated_type
    with builder.if_else(builder.icmp_signed("==", operands.accumulate, t.int_constant(0))) as (replace, accumulate):
        with replace:
            for n in range(n_tokens):
                for g in range(n_groups):
                    t.store(builder, t.value_of(builder, sums[g][n]), t.at(builder, targets[n][g]))
        with accumulate:
            for n in range(n_tokens):
                for g in range(n_groups):
                    target = t.at(builder, targets[n][g])
                    total = builder.fadd(t.load(builder, kind, target), t.value_of(builder, sums[g][n]))
                    t.store(builder, total, target)


def _addresses(builder: Builder, first: Value, stride: Value, count: int) -> list[Value]:
    addresses = [first]
    for _ in range(count - 1):
        addresses.append(builder.add(addresses[-1], stride))
    return addresses


def _load_scales(builder: Builder, kind: int, lanes: int, block: Value, index: int) -> Value | None:
    """Row number ``index`` of the numbers behind a block's integers, as floats: each d, then m, or None."""
    form = WEIGHT_FORMATS[kind]
    if index == form.n_scales and not form.has_minimum:
        return None
    pointer = t.beyond(builder, block, (form.integer_bytes + form.scale_bytes * index) * lanes)
    if form.scale_bytes == FLOAT_BYTES:
        return t.load(builder, t.float_vector(lanes), pointer)
    return builder.fpext(t.load(builder, t.vector(t.F16, lanes), pointer, HALF_BYTES), t.float_vector(lanes))
