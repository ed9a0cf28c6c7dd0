"""A choice of experts in place of the feed-forward part, and the router that makes it (docs/numerics.md, "Experts").

Phases: norm and route each row | list the rows of each expert | gather them | gate and up of every expert that has
rows | down of the same | each row's sum. Only the weights of chosen experts are read. What a row gets depends on that
row alone: other rows at the same expert share its weights, never a sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.engine.kernels.attention import activation_stride
from kvferry.engine.kernels.feed_forward import gated_units
from kvferry.engine.kernels.intrinsics import (
    add_floats,
    add_scaled,
    copy_bytes,
    dot_floats,
    exp_float,
    load_float,
    load_int32,
    norm_floats,
    norm_quantise,
    store_float,
    store_int32,
)
from kvferry.engine.kernels.jit import glue, kernel
from kvferry.engine.kernels.layout import FLOAT_BYTES, QUANT_BLOCK
from kvferry.engine.kernels.linear import UNIT_GROUPS, UNIT_ROWS, group_bytes, linear
from kvferry.engine.kernels.sync import barrier
from kvferry.engine.kernels.work import take


@kernel
def route(
    x: int, router: int, n_blocks: int, n_experts: int, n_active: int, normalise: int, p: int, ids: int, weights: int
) -> None:
    """The experts of one normed float row: ``ids`` int32 and ``weights`` float32 [n_active], best first.

    ``p``: room for n_experts floats. Of equal probabilities the lowest id is taken first.
    """
    row_bytes = n_blocks * QUANT_BLOCK * FLOAT_BYTES
    largest = dot_floats(x, router, n_blocks)
    for expert in range(n_experts):
        logit = dot_floats(x, router + expert * row_bytes, n_blocks)
        store_float(p + expert * FLOAT_BYTES, logit)
        largest = max(largest, logit)
    total = np.float32(0.0)
    for expert in range(n_experts):
        power = exp_float(load_float(p + expert * FLOAT_BYTES) - largest)
        store_float(p + expert * FLOAT_BYTES, power)
        total = total + power
    for expert in range(n_experts):
        store_float(p + expert * FLOAT_BYTES, load_float(p + expert * FLOAT_BYTES) / total)
    chosen_sum = np.float32(0.0)
    for rank in range(n_active):
        best, best_id = np.float32(-1.0), np.int64(0)
        for expert in range(n_experts):
            probability = load_float(p + expert * FLOAT_BYTES)
            if probability > best:
                best, best_id = probability, np.int64(expert)
        store_int32(ids + 4 * rank, best_id)
        store_float(weights + rank * FLOAT_BYTES, best)
        store_float(p + best_id * FLOAT_BYTES, np.float32(-2.0))  # not again
        chosen_sum = chosen_sum + best
    if normalise == 1:
        for rank in range(n_active):
            at = weights + rank * FLOAT_BYTES
            store_float(at, load_float(at) / chosen_sum)


@kernel
def _list_places(model: Any, workspace: Any, n_rows: int) -> None:
    """Order all choices by expert, then row: where each goes, where each expert's end, which experts have any."""
    n_choices = n_rows * model.n_active
    ends = workspace.expert_ends_at
    for expert in range(model.n_experts):
        store_int32(ends + 4 * expert, np.int64(0))
    for choice in range(n_choices):
        at = ends + 4 * load_int32(workspace.chosen_at + 4 * choice)
        store_int32(at, load_int32(at) + 1)
    start, n_with_rows = np.int64(0), np.int64(0)
    for expert in range(model.n_experts):
        count = load_int32(ends + 4 * expert)
        store_int32(ends + 4 * expert, start)
        start += count
        if count > 0:
            n_with_rows += 1
            store_int32(workspace.active_at + 4 * n_with_rows, expert)
    store_int32(workspace.active_at, n_with_rows)
    for choice in range(n_choices):
        at = ends + 4 * load_int32(workspace.chosen_at + 4 * choice)
        place = load_int32(at)
        store_int32(workspace.places_at + 4 * choice, place)
        store_int32(at, place + 1)


@kernel
def _start_of(workspace: Any, expert: int) -> int:
    """First place of an expert."""
    return load_int32(workspace.expert_ends_at + 4 * (expert - 1)) if expert > 0 else 0


@kernel
def _run_of(n_units: int, n_rows: int, n_threads: int) -> int:
    """Units of one expert that a thread takes at a time: a long stream of weights when there is one row."""
    return (n_units + n_threads - 1) // n_threads if n_rows == 1 else 1


@glue
def _gate_and_up(model: Any, workspace: Any, step: Any, layer: Any, scratch: int, phase: int, n_threads: int) -> None:
    n_blocks = model.hidden_size // QUANT_BLOCK
    n_units = model.expert_size // UNIT_ROWS
    stride, gated_stride = activation_stride(model.hidden_size), activation_stride(model.expert_size)
    gate_bytes = n_units * UNIT_GROUPS * group_bytes(layer.gate_kind, n_blocks)
    up_bytes = n_units * UNIT_GROUPS * group_bytes(layer.up_kind, n_blocks)
    run = _run_of(n_units, step.n_rows, n_threads)
    n_runs = (n_units + run - 1) // run
    n_items = load_int32(workspace.active_at) * n_runs
    item = take(workspace, phase, np.int64(1))
    while item < n_items:
        expert = load_int32(workspace.active_at + 4 + 4 * (item // n_runs))
        start = _start_of(workspace, expert)
        first = item % n_runs * run
        gated_units(
            layer.gate_kind, layer.gate_at + expert * gate_bytes, layer.up_kind, layer.up_at + expert * up_bytes,
            n_blocks, first, min(run, n_units - first), n_units,
            workspace.gathered_at + start * stride, stride,
            load_int32(workspace.expert_ends_at + 4 * expert) - start,
            workspace.expert_gated_at + start * gated_stride, scratch + workspace.scratch_linear,
        )  # fmt: skip
        item = take(workspace, phase, np.int64(1))


@glue
def _down(model: Any, workspace: Any, step: Any, layer: Any, phase: int, n_threads: int) -> None:
    n_blocks = model.expert_size // QUANT_BLOCK
    n_units = model.hidden_size // UNIT_ROWS
    stride, row_bytes = activation_stride(model.expert_size), model.hidden_size * FLOAT_BYTES
    down_bytes = n_units * UNIT_GROUPS * group_bytes(layer.down_kind, n_blocks)
    run = _run_of(n_units, step.n_rows, n_threads)
    n_runs = (n_units + run - 1) // run
    n_items = load_int32(workspace.active_at) * n_runs
    item = take(workspace, phase, np.int64(1))
    while item < n_items:
        expert = load_int32(workspace.active_at + 4 + 4 * (item // n_runs))
        start = _start_of(workspace, expert)
        first = item % n_runs * run
        linear(
            layer.down_kind, layer.down_at + expert * down_bytes, n_blocks, first, min(run, n_units - first),
            workspace.expert_gated_at + start * stride, stride,
            load_int32(workspace.expert_ends_at + 4 * expert) - start,
            workspace.expert_out_at + start * row_bytes + first * UNIT_ROWS * FLOAT_BYTES, row_bytes, np.int64(0),
        )  # fmt: skip
        item = take(workspace, phase, np.int64(1))


@glue
def _add_weighted(model: Any, workspace: Any, step: Any, scratch: int, thread: int, n_threads: int) -> None:
    """hidden += the sum of the experts' outputs by weight, best first."""
    n_blocks = model.hidden_size // QUANT_BLOCK
    row_bytes = model.hidden_size * FLOAT_BYTES
    total = scratch + workspace.scratch_row
    for row in range(thread, step.n_rows, n_threads):
        for i in range(model.hidden_size):
            store_float(total + i * FLOAT_BYTES, np.float32(0.0))
        for choice in range(row * model.n_active, (row + 1) * model.n_active):
            source = workspace.expert_out_at + load_int32(workspace.places_at + 4 * choice) * row_bytes
            add_scaled(total, source, load_float(workspace.chosen_weights_at + choice * FLOAT_BYTES), n_blocks)
        add_floats(workspace.hidden_at + row * row_bytes, total, n_blocks)


@glue
def mixture(
    model: Any, workspace: Any, step: Any, layer: Any, scratch: int, phase: int, thread: int, n_threads: int
) -> None:
    """The feed-forward part of a sparse layer; takes work from counters ``phase`` and ``phase + 1``."""
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride = activation_stride(model.hidden_size)
    normed = scratch + workspace.scratch_row
    for row in range(thread, step.n_rows, n_threads):
        hidden = workspace.hidden_at + row * model.hidden_size * FLOAT_BYTES
        norm_floats(hidden, layer.ffn_norm_at, n_blocks, model.rms_eps, normed)
        norm_quantise(hidden, layer.ffn_norm_at, n_blocks, model.rms_eps, workspace.normed_at + row * stride)
        route(
            normed, layer.router_at, n_blocks, model.n_experts, model.n_active, model.normalise,
            normed + model.hidden_size * FLOAT_BYTES,
            workspace.chosen_at + 4 * row * model.n_active, workspace.chosen_weights_at + 4 * row * model.n_active,
        )  # fmt: skip
    barrier(workspace.control_at, n_threads)
    if thread == 0:
        _list_places(model, workspace, step.n_rows)
    barrier(workspace.control_at, n_threads)
    for choice in range(thread, step.n_rows * model.n_active, n_threads):
        source = workspace.normed_at + choice // model.n_active * stride
        copy_bytes(workspace.gathered_at + load_int32(workspace.places_at + 4 * choice) * stride, source, stride)
    barrier(workspace.control_at, n_threads)
    _gate_and_up(model, workspace, step, layer, scratch, phase, n_threads)
    barrier(workspace.control_at, n_threads)
    _down(model, workspace, step, layer, phase + 1, n_threads)
    barrier(workspace.control_at, n_threads)
    _add_weighted(model, workspace, step, scratch, thread, n_threads)
