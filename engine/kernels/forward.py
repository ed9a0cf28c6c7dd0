"""One step of the model: a batch of rows through all layers, in one call per thread.

Every thread runs ``forward`` with the same records. The work of each phase is shared out in portions, and a phase
begins when the one before is done (work.py). A row's arithmetic never depends on which thread does it or on what other
rows are in the batch.

Phases of a layer: norm | q, k, v with rope, K and V into the cache (heads.py) | attention | o, added to the residual |
norm | gate and up with SiLU, quantised | down, added to the residual. In a sparse layer experts.py stands for the last
three. Behind the last layer's K and V only the rows that get logits go on.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvferry.engine.kernels.attention import activation_stride, attend_all
from kvferry.engine.kernels.experts import mixture
from kvferry.engine.kernels.feed_forward import gate_and_up, store_gated
from kvferry.engine.kernels.heads import project_heads
from kvferry.engine.kernels.intrinsics import add_floats, copy_bytes, load_int, load_int32, norm_quantise
from kvferry.engine.kernels.jit import glue, kernel
from kvferry.engine.kernels.layout import FLOAT_BYTES, QUANT_BLOCK
from kvferry.engine.kernels.linear import UNIT_ROWS, linear, unpack_row
from kvferry.engine.kernels.pages import let_go
from kvferry.engine.kernels.sync import SLOT_SPAN, await_step, enter_step, is_announced, leave_step
from kvferry.engine.kernels.work import N_KINDS, Run, claim, finish, next_portion, open_phase, portion_size, run_size

# Up to this many rows every thread computes the norms for itself: that is cheaper than a phase.
PRIVATE_ROWS: Final = 4
# The phases of a layer by number; experts.py counts on from FEED_FORWARD.
ATTENTION_NORM, HEADS, ATTENTION, OUTPUT, FFN_NORM, FEED_FORWARD, DOWN, DEEPSTACK = 0, 1, 2, 3, 4, 5, 6, 11
PHASES_PER_LAYER: Final = N_KINDS
# Behind those of all layers: the embedding; the rows that go on, and their norm and q heads; norm and logits.
EMBED, GATHER, LAST_NORM, LAST_HEADS, LOGITS_NORM, LOGITS = 0, 1, 2, 3, 4, 5
PHASES_BESIDE_LAYERS: Final = 6
# One row's logits are shared out in so many portions for each thread: it is the longest phase, and small ones balance.
LOGITS_PORTIONS: Final = 8


@glue
def _embed(run: Any, number: int) -> None:
    model, workspace, step = run.model, run.workspace, run.step
    n_blocks = model.hidden_size // QUANT_BLOCK
    row_bytes = model.hidden_size * FLOAT_BYTES
    size = portion_size(step.n_rows, np.int64(2), run.n_threads)
    phase = open_phase(run, number, (step.n_rows + size - 1) // size, np.int64(0))
    portion = next_portion(phase)
    while portion >= 0:
        for row in range(portion * size, min(portion * size + size, step.n_rows)):
            token = load_int32(step.tokens_at + 4 * row)
            target = workspace.hidden_at + row * row_bytes
            given = load_int(step.given_rows_at + 8 * row)
            if given != 0:
                copy_bytes(target, given, row_bytes)
            else:
                unpack_row(model.embedding_kind, model.embedding_at, n_blocks, token, target)
        finish(phase)
        portion = next_portion(phase)


@kernel
def _norm(run: Any, weight_at: int, number: int) -> int:
    """Norm and quantise all rows of the residual stream; returns where they are."""
    model, workspace = run.model, run.workspace
    n_rows = run.step.n_rows
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride, row_bytes = activation_stride(model.hidden_size), model.hidden_size * FLOAT_BYTES
    aside = run.scratch + workspace.scratch_normed
    if n_rows <= PRIVATE_ROWS:
        for row in range(n_rows):
            norm_quantise(
                workspace.hidden_at + row * row_bytes, weight_at, n_blocks, model.rms_eps, aside + row * stride
            )
        return aside
    size = portion_size(n_rows, n_rows, run.n_threads)
    phase = open_phase(run, number, (n_rows + size - 1) // size, n_rows)
    portion = next_portion(phase)
    while portion >= 0:
        first, end = portion * size, min(portion * size + size, n_rows)
        target = aside if phase.retried else workspace.normed_at + first * stride
        for row in range(first, end):
            source = workspace.hidden_at + row * row_bytes
            norm_quantise(source, weight_at, n_blocks, model.rms_eps, target + (row - first) * stride)
        if claim(phase, portion):
            if phase.retried:
                copy_bytes(workspace.normed_at + first * stride, aside, (end - first) * stride)
            finish(phase)
        portion = next_portion(phase)
    return workspace.normed_at


@kernel
def _add_to_hidden(run: Any, kind: int, weights: int, x: int, n_inputs: int, number: int) -> None:
    """hidden += linear(x): the o and down projections. A unit is 32 outputs."""
    model, step = run.model, run.step
    n_units = model.hidden_size // UNIT_ROWS
    row_bytes = model.hidden_size * FLOAT_BYTES
    n_blocks = n_inputs // QUANT_BLOCK
    stride = activation_stride(n_inputs)
    size = run_size(n_units, step.n_rows, run.n_threads)
    phase = open_phase(run, number, (n_units + size - 1) // size, step.n_rows)
    aside = run.scratch + run.workspace.scratch_linear
    portion = next_portion(phase)
    while portion >= 0:
        first = portion * size
        n = min(size, n_units - first)
        hidden = run.workspace.hidden_at + first * UNIT_ROWS * FLOAT_BYTES
        if phase.retried:
            width = n * UNIT_ROWS * FLOAT_BYTES
            linear(kind, weights, n_blocks, first, n, x, stride, step.n_rows, aside, width, np.int64(0))
            if claim(phase, portion):
                for row in range(step.n_rows):
                    add_floats(hidden + row * row_bytes, aside + row * width, n)
                finish(phase)
        else:
            linear(kind, weights, n_blocks, first, n, x, stride, step.n_rows, hidden, row_bytes, np.int64(1))
            finish(phase)
        portion = next_portion(phase)


@glue
def _feed_forward(run: Any, layer: Any, normed: int, number: int) -> None:
    """silu(gate) * up, quantised into the rows that down reads. A unit is 32 outputs of both."""
    model, step = run.model, run.step
    n_units = model.ffn_size // UNIT_ROWS
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride = activation_stride(model.hidden_size)
    size = run_size(n_units, step.n_rows, run.n_threads)
    phase = open_phase(run, number, (n_units + size - 1) // size, step.n_rows)
    aside = run.scratch + run.workspace.scratch_linear
    portion = next_portion(phase)
    while portion >= 0:
        first = portion * size
        n = min(size, n_units - first)
        gate_and_up(
            layer.gate_kind, layer.gate_at, layer.up_kind, layer.up_at,
            n_blocks, first, n, normed, stride, step.n_rows, aside,
        )  # fmt: skip
        if claim(phase, portion):
            store_gated(aside, first, n, n_units, step.n_rows, run.workspace.gated_at)
            finish(phase)
        portion = next_portion(phase)


@glue
def _add_deepstack(run: Any, index: int, number: int) -> None:
    """Add what the vision tower made for this layer to the rows of image tokens."""
    step = run.step
    row_bytes = run.model.hidden_size * FLOAT_BYTES
    size = portion_size(step.n_rows, np.int64(2), run.n_threads)
    phase = open_phase(run, number, (step.n_rows + size - 1) // size, np.int64(0))
    portion = next_portion(phase)
    while portion >= 0:
        for row in range(portion * size, min(portion * size + size, step.n_rows)):
            features = load_int(step.deepstack_at + 8 * row)
            if features != 0:
                source = features + index * row_bytes
                add_floats(run.workspace.hidden_at + row * row_bytes, source, run.model.hidden_size // QUANT_BLOCK)
        finish(phase)
        portion = next_portion(phase)


@kernel
def _logits(run: Any, normed: int, number: int) -> None:
    """A unit is 32 tokens of the vocabulary; logit rows are as wide as all units."""
    model, step = run.model, run.step
    n_units = (model.vocab_size + UNIT_ROWS - 1) // UNIT_ROWS
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride = activation_stride(model.hidden_size)
    row_bytes = n_units * UNIT_ROWS * FLOAT_BYTES
    size = run_size(n_units, step.n_rows, run.n_threads * LOGITS_PORTIONS)
    phase = open_phase(run, number, (n_units + size - 1) // size, step.n_rows)
    aside = run.scratch + run.workspace.scratch_linear
    portion = next_portion(phase)
    while portion >= 0:
        first = portion * size
        n = min(size, n_units - first)
        width = n * UNIT_ROWS * FLOAT_BYTES
        logits = step.logits_at + first * UNIT_ROWS * FLOAT_BYTES
        target, target_stride = (aside, width) if phase.retried else (logits, row_bytes)
        linear(
            model.head_kind, model.head_at, n_blocks, first, n,
            normed, stride, step.n_rows, target, target_stride, np.int64(0),
        )  # fmt: skip
        if claim(phase, portion):
            if phase.retried:
                for row in range(step.n_rows):
                    copy_bytes(logits + row * row_bytes, aside + row * width, width)
            finish(phase)
        portion = next_portion(phase)


@glue
def _gather(run: Any, rows_at: int, n_rows: int, number: int) -> None:
    """Move the rows that go on, listed in ascending order, to the front of the residual stream."""
    row_bytes = run.model.hidden_size * FLOAT_BYTES
    phase = open_phase(run, number, np.int64(1), np.int64(0))
    portion = next_portion(phase)
    while portion >= 0:
        for i in range(n_rows):
            row = load_int32(rows_at + 4 * i)
            if row != i:
                hidden = run.workspace.hidden_at
                copy_bytes(hidden + i * row_bytes, hidden + row * row_bytes, row_bytes)
        finish(phase)
        portion = next_portion(phase)


@glue
def forward(models: Any, layers: Any, workspaces: Any, steps: Any, thread: int, n_threads: int, announced: int) -> None:
    """Run one step (records.py). All threads of the step may call it; when one returns, the step is done."""
    model, workspace = models[0], workspaces[0]
    slot = announced % SLOT_SPAN
    scratch = workspace.scratch_at + thread * workspace.scratch_stride
    phases = workspace.phases_at + slot * workspace.phases_stride
    run = Run(model, workspace, steps[2 * slot], phases, scratch, n_threads)
    going_on = Run(model, workspace, steps[2 * slot + 1], phases, scratch, n_threads)
    beside = model.n_layers * PHASES_PER_LAYER
    n_heads, n_all_heads = model.n_heads, model.n_heads + 2 * model.n_kv_heads
    attended_size = model.n_heads * model.head_dim
    _embed(run, beside + EMBED)
    for index in range(model.n_layers):
        if not is_announced(workspace.control_at, announced):
            return  # late: the others are done with the step
        layer = layers[index]
        phase = index * PHASES_PER_LAYER
        normed = _norm(run, layer.attention_norm_at, phase + ATTENTION_NORM)
        if index == model.n_layers - 1 and going_on.step.n_rows < run.step.n_rows:
            project_heads(run, layer, index, normed, n_heads, n_all_heads, phase + HEADS)
            run = going_on
            if run.step.n_rows == 0:
                return
            _gather(run, run.step.from_rows_at, run.step.n_rows, beside + GATHER)
            normed = _norm(run, layer.attention_norm_at, beside + LAST_NORM)
            project_heads(run, layer, index, normed, np.int64(0), n_heads, beside + LAST_HEADS)
        else:
            project_heads(run, layer, index, normed, np.int64(0), n_all_heads, phase + HEADS)
        attend_all(run, index, phase + ATTENTION)
        _add_to_hidden(run, layer.o_kind, layer.o_at, workspace.attended_at, attended_size, phase + OUTPUT)
        if layer.router_at != 0:
            mixture(run, layer, phase + FEED_FORWARD)
        else:
            normed = _norm(run, layer.ffn_norm_at, phase + FFN_NORM)
            _feed_forward(run, layer, normed, phase + FEED_FORWARD)
            _add_to_hidden(run, layer.down_kind, layer.down_at, workspace.gated_at, model.ffn_size, phase + DOWN)
        if index < run.step.n_deepstack:
            _add_deepstack(run, index, phase + DEEPSTACK)
        if thread == 0:
            let_go(layer.pages_at, layer.pages_bytes)
    if run.step.n_rows > 0:
        normed = _norm(run, model.output_norm_at, beside + LOGITS_NORM)
        _logits(run, normed, beside + LOGITS)
        if thread == 0:
            let_go(model.head_pages_at, model.head_pages_bytes)


@kernel
def run_steps(
    models: Any, layers: Any, workspaces: Any, steps: Any, thread: int, n_threads: int, announced: int
) -> None:
    """Thread 0 runs the announced step and returns when it is done. The others run every step that is announced behind
    it, until one has no rows.

    A worker thread lives in here, so that it needs the interpreter's lock neither to start nor to end a step.
    """
    control = workspaces[0].control_at
    if thread == 0:
        forward(models, layers, workspaces, steps, thread, n_threads, announced)
        return
    is_running = True
    while is_running:
        announced = await_step(control, thread, announced)
        if enter_step(control, thread, announced):
            is_running = steps[2 * (announced % SLOT_SPAN)].n_rows > 0
            if is_running:
                forward(models, layers, workspaces, steps, thread, n_threads, announced)
        leave_step(control, thread)
