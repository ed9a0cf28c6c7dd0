"""The linear tile: T tokens times G weight groups, the kernel that nearly all time is spent in.

Definition (docs/numerics.md, "linear"): an output element starts at +0 and takes, block by block of 32 k in order,
``acc = fma(float(dot) * s, d, acc)`` and, for weights with a minimum, ``acc = fma(m, s * sum, acc)``; dot is the exact
integer dot product of the block. Every lane is one output, so the tile's shape cannot be seen in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.instruction_sets import InstructionSet
from kvferry.engine.kernels.ir_tools import Builder, Value
from kvferry.engine.kernels.layout import CACHE_LINE, QUANT_BLOCK, WEIGHTS_Q4, weight_block_bytes

_K_GROUPS = QUANT_BLOCK // 4  # a dot instruction takes 4 consecutive k at a time


@dataclass(frozen=True)
class LinearTile:
    """What is fixed when a tile is compiled: weight kind, tokens T, weight groups G side by side, and how far ahead of
    the weights being read memory is asked for more (bytes, a multiple of a cache line; 0: not at all)."""

    kind: int
    n_tokens: int
    n_groups: int
    prefetch_bytes: int = 0


@dataclass(frozen=True)
class LinearOperands:
    """The tile's operands, all i64; addresses and strides in bytes.

    ``weights``: first group's first block, the next group ``group_stride`` further. ``activations``: first token's
    quantised row, the next ``activation_stride`` further. ``output``: float32 of the first token and group; next token
    ``output_stride``, next group ``output_group_stride`` further. ``accumulate``: 0 stores the sums, 1 adds them to
    what ``output`` holds (the residual stream).
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


def build_linear_tile(builder: Builder, isa: InstructionSet, tile: LinearTile, operands: LinearOperands) -> None:
    lanes = isa.group_rows
    floats = t.float_vector(lanes)
    block_bytes = weight_block_bytes(tile.kind, lanes)
    groups, tokens = range(tile.n_groups), range(tile.n_tokens)
    sums = [[t.variable(builder, floats, t.constant(floats, 0.0), "sum") for _ in tokens] for _ in groups]
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
        if tile.prefetch_bytes:
            for group in weights:
                for line in range(0, block_bytes, CACHE_LINE):
                    t.prefetch(builder, t.beyond(builder, group, tile.prefetch_bytes + line))
        dots = _block_dots(builder, isa, tile, weights, values, sum_offsets)
        for g in groups:
            parameters = (QUANT_BLOCK // 2 if tile.kind == WEIGHTS_Q4 else QUANT_BLOCK) * lanes
            d = _load_halves(builder, t.beyond(builder, weights[g], parameters), lanes)
            m = None
            if tile.kind == WEIGHTS_Q4:
                m = _load_halves(builder, t.beyond(builder, weights[g], parameters + 2 * lanes), lanes)
            for n in tokens:
                dot = builder.sitofp(isa.dot.finish(builder, tile.kind, dots[g][n]), floats)
                dot = builder.fmul(dot, t.load_splat(builder, scales[n], lanes))
                total = t.fma(builder, dot, d, t.value_of(builder, sums[g][n]))
                if m is not None:
                    scaled_sum = t.load_splat(builder, t.beyond(builder, scales[n], 4), lanes)
                    total = t.fma(builder, m, scaled_sum, total)
                builder.store(total, sums[g][n])

    t.counted_loop(builder, operands.n_blocks, one_block, "block")
    _store_sums(builder, operands, sums)


def _block_dots(
    builder: Builder,
    isa: InstructionSet,
    tile: LinearTile,
    weights: list[Value],
    values: list[Value],
    sum_offsets: list[Value],
) -> list[list[Value]]:
    """The integer dot products of one block, [group][token]."""
    dot, kind, lanes = isa.dot, tile.kind, isa.group_rows
    vector_bytes = 4 * lanes
    bytes_type = t.vector(t.I8, vector_bytes)
    totals = [[dot.start(builder, kind, sum_offsets[n]) for n in range(tile.n_tokens)] for _ in weights]

    def one_k_group(k_group: int, vectors: list[Value]) -> None:
        prepared = [dot.prepare(builder, kind, v) for v in vectors]
        for n in range(tile.n_tokens):
            activations = dot.broadcast(builder, t.beyond(builder, values[n], 4 * k_group))
            for g in range(tile.n_groups):
                totals[g][n] = dot.step(builder, kind, totals[g][n], prepared[g], activations)
        if isa.pin_class:
            for g in range(tile.n_groups):
                totals[g] = [t.pin(builder, total, isa.pin_class) for total in totals[g]]

    if kind == WEIGHTS_Q4:
        for j in range(_K_GROUPS // 2):
            raw = [t.load(builder, bytes_type, t.beyond(builder, w, vector_bytes * j), 1) for w in weights]
            one_k_group(j, [builder.and_(r, t.constant(bytes_type, 15)) for r in raw])
            one_k_group(j + _K_GROUPS // 2, [builder.lshr(r, t.constant(bytes_type, 4)) for r in raw])
    else:
        for j in range(_K_GROUPS):
            one_k_group(j, [t.load(builder, bytes_type, t.beyond(builder, w, vector_bytes * j), 1) for w in weights])
    return totals


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


def _load_halves(builder: Builder, pointer: Value, lanes: int) -> Value:
    return builder.fpext(t.load(builder, t.vector(t.F16, lanes), pointer, 2), t.float_vector(lanes))
