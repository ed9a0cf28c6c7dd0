"""A choice of experts in place of the feed-forward part, and the router that makes it (docs/numerics.md, "Experts").

Phases: norm and route each row | list the rows of each expert | gather them | gate and up of every expert that has
rows | down of the same | each row's sum. Only the weights of chosen experts are read. What a row gets depends on that
row alone: other rows at the same expert share its weights, never a sum.

How many portions the experts' phases have is known only in mid-step. It is noted in their lines (work.py), where a late
thread finds it as well; the lists themselves may be another layer's by then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.engine.kernels.attention import activation_stride
from kvferry.engine.kernels.feed_forward import gate_and_up, store_gated
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
from kvferry.engine.kernels.work import claim, finish, line_of, next_portion, note, noted, open_phase, portion_size

# Phases, counted from the first of a sparse layer's own.
_ROUTE, _LIST, _GATHER, _GATE, _DOWN, _SUM = 0, 1, 2, 3, 4, 5


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
def _rows_of(workspace: Any, expert: int, most: int) -> tuple[int, int]:
    """First place of an expert, and how many rows it has: at most ``most``, also where a late thread asks."""
    start = load_int32(workspace.expert_ends_at + 4 * (expert - 1)) if expert > 0 else 0
    return start, min(max(load_int32(workspace.expert_ends_at + 4 * expert) - start, 0), most)


@kernel
def _route_rows(run: Any, layer: Any, number: int) -> None:
    model, workspace = run.model, run.workspace
    n_blocks, n_active = model.hidden_size // QUANT_BLOCK, model.n_active
    stride = activation_stride(model.hidden_size)
    normed = run.scratch + workspace.scratch_row
    row_aside = run.scratch + workspace.scratch_choice
    size = portion_size(run.step.n_rows, run.step.n_rows, run.n_threads)
    phase = open_phase(run, number, (run.step.n_rows + size - 1) // size, run.step.n_rows)
    portion = next_portion(phase)
    while portion >= 0:
        for row in range(portion * size, min(portion * size + size, run.step.n_rows)):
            hidden = workspace.hidden_at + row * model.hidden_size * FLOAT_BYTES
            quantised = workspace.normed_at + row * stride
            ids = workspace.chosen_at + 4 * row * n_active
            weights = workspace.chosen_weights_at + FLOAT_BYTES * row * n_active
            norm_floats(hidden, layer.ffn_norm_at, n_blocks, model.rms_eps, normed)
            # One row is a portion where portions are retried.
            quantised_to, ids_to = (row_aside, row_aside + stride) if phase.retried else (quantised, ids)
            weights_to = ids_to + 4 * n_active if phase.retried else weights
            norm_quantise(hidden, layer.ffn_norm_at, n_blocks, model.rms_eps, quantised_to)
            route(
                normed, layer.router_at, n_blocks, model.n_experts, n_active, model.normalise,
                normed + model.hidden_size * FLOAT_BYTES, ids_to, weights_to,
            )  # fmt: skip
            if phase.retried and claim(phase, portion):
                copy_bytes(quantised, quantised_to, stride)
                copy_bytes(ids, ids_to, 4 * n_active)
                copy_bytes(weights, weights_to, FLOAT_BYTES * n_active)
                finish(phase)
        if not phase.retried:
            finish(phase)
        portion = next_portion(phase)


@glue
def _list_and_note(run: Any, first: int, n_gate_runs: int, n_down_runs: int) -> None:
    phase = open_phase(run, first + _LIST, np.int64(1), np.int64(0))
    portion = next_portion(phase)
    while portion >= 0:
        _list_places(run.model, run.workspace, run.step.n_rows)
        n_with_rows = load_int32(run.workspace.active_at)
        note(line_of(run, first + _GATE), n_with_rows * n_gate_runs)
        note(line_of(run, first + _DOWN), n_with_rows * n_down_runs)
        finish(phase)
        portion = next_portion(phase)


@glue
def _gather(run: Any, number: int) -> None:
    workspace, n_active = run.workspace, run.model.n_active
    stride = activation_stride(run.model.hidden_size)
    size = portion_size(run.step.n_rows, np.int64(2), run.n_threads)
    phase = open_phase(run, number, (run.step.n_rows + size - 1) // size, np.int64(0))
    portion = next_portion(phase)
    while portion >= 0:
        end = min(portion * size + size, run.step.n_rows)
        for choice in range(portion * size * n_active, end * n_active):
            source = workspace.normed_at + choice // n_active * stride
            copy_bytes(workspace.gathered_at + load_int32(workspace.places_at + 4 * choice) * stride, source, stride)
        finish(phase)
        portion = next_portion(phase)


@glue
def _gate_and_up(run: Any, layer: Any, size: int, n_runs: int, number: int) -> None:
    """A portion is a run of ``size`` units of one expert, which has ``n_runs`` of them."""
    model, workspace, n_rows = run.model, run.workspace, run.step.n_rows
    n_blocks, n_units = model.hidden_size // QUANT_BLOCK, model.expert_size // UNIT_ROWS
    stride, gated_stride = activation_stride(model.hidden_size), activation_stride(model.expert_size)
    gate_bytes = n_units * UNIT_GROUPS * group_bytes(layer.gate_kind, n_blocks)
    up_bytes = n_units * UNIT_GROUPS * group_bytes(layer.up_kind, n_blocks)
    aside = run.scratch + workspace.scratch_linear
    phase = open_phase(run, number, noted(line_of(run, number)), n_rows)
    portion = next_portion(phase)
    while portion >= 0:
        expert = load_int32(workspace.active_at + 4 + 4 * (portion // n_runs))
        start, n = _rows_of(workspace, expert, n_rows)
        first = portion % n_runs * size
        n_run_units = min(size, n_units - first)
        gate_and_up(
            layer.gate_kind, layer.gate_at + expert * gate_bytes, layer.up_kind, layer.up_at + expert * up_bytes,
            n_blocks, first, n_run_units, workspace.gathered_at + start * stride, stride, n, aside,
        )  # fmt: skip
        if claim(phase, portion):
            store_gated(aside, first, n_run_units, n_units, n, workspace.expert_gated_at + start * gated_stride)
            finish(phase)
        portion = next_portion(phase)


@glue
def _down(run: Any, layer: Any, size: int, n_runs: int, number: int) -> None:
    """A portion is as in gate and up."""
    model, workspace, n_rows = run.model, run.workspace, run.step.n_rows
    n_blocks, n_units = model.expert_size // QUANT_BLOCK, model.hidden_size // UNIT_ROWS
    stride, row_bytes = activation_stride(model.expert_size), model.hidden_size * FLOAT_BYTES
    down_bytes = n_units * UNIT_GROUPS * group_bytes(layer.down_kind, n_blocks)
    aside = run.scratch + workspace.scratch_linear
    phase = open_phase(run, number, noted(line_of(run, number)), n_rows)
    portion = next_portion(phase)
    while portion >= 0:
        expert = load_int32(workspace.active_at + 4 + 4 * (portion // n_runs))
        start, n = _rows_of(workspace, expert, n_rows)
        first = portion % n_runs * size
        n_run_units = min(size, n_units - first)
        width = n_run_units * UNIT_ROWS * FLOAT_BYTES
        out = workspace.expert_out_at + start * row_bytes + first * UNIT_ROWS * FLOAT_BYTES
        target, target_stride = (aside, width) if phase.retried else (out, row_bytes)
        linear(
            layer.down_kind, layer.down_at + expert * down_bytes, n_blocks, first, n_run_units,
            workspace.expert_gated_at + start * stride, stride, n, target, target_stride, np.int64(0),
        )  # fmt: skip
        if claim(phase, portion):
            if phase.retried:
                for row in range(n):
                    copy_bytes(out + row * row_bytes, aside + row * width, width)
            finish(phase)
        portion = next_portion(phase)


@glue
def _add_weighted(run: Any, number: int) -> None:
    """hidden += the sum of the experts' outputs by weight, best first."""
    model, workspace = run.model, run.workspace
    n_blocks = model.hidden_size // QUANT_BLOCK
    row_bytes = model.hidden_size * FLOAT_BYTES
    total = run.scratch + workspace.scratch_row
    phase = open_phase(run, number, run.step.n_rows, run.step.n_rows)
    row = next_portion(phase)
    while row >= 0:
        for i in range(model.hidden_size):
            store_float(total + i * FLOAT_BYTES, np.float32(0.0))
        for choice in range(row * model.n_active, (row + 1) * model.n_active):
            source = workspace.expert_out_at + load_int32(workspace.places_at + 4 * choice) * row_bytes
            add_scaled(total, source, load_float(workspace.chosen_weights_at + choice * FLOAT_BYTES), n_blocks)
        if claim(phase, row):
            add_floats(workspace.hidden_at + row * row_bytes, total, n_blocks)
            finish(phase)
        row = next_portion(phase)


@glue
def mixture(run: Any, layer: Any, number: int) -> None:
    """The feed-forward part of a sparse layer; its phases have the numbers from ``number`` on."""
    gate_units, down_units = run.model.expert_size // UNIT_ROWS, run.model.hidden_size // UNIT_ROWS
    n_portions = run.n_threads if run.step.n_rows == 1 else max(gate_units, down_units)
    gate_size = (gate_units + n_portions - 1) // n_portions
    down_size = (down_units + n_portions - 1) // n_portions
    n_gate_runs = (gate_units + gate_size - 1) // gate_size
    n_down_runs = (down_units + down_size - 1) // down_size
    _route_rows(run, layer, number + _ROUTE)
    _list_and_note(run, number, n_gate_runs, n_down_runs)
    _gather(run, number + _GATHER)
    _gate_and_up(run, layer, gate_size, n_gate_runs, number + _GATE)
    _down(run, layer, down_size, n_down_runs, number + _DOWN)
    _add_weighted(run, number + _SUM)
