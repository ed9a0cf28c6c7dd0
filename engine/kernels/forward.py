"""One step of the model: a batch of rows through all layers, in one call per thread.

Every thread runs ``forward`` with the same records. Each phase hands out disjoint outputs; between phases stands a
barrier. A row's arithmetic never depends on which thread does it or on what other rows are in the batch.

Phases of a layer: norm | q, k, v with rope, K and V into the cache | attention | o, added to the residual | norm |
gate and up with SiLU, quantised | down, added to the residual. In a sparse layer experts.py stands for the last three.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvferry.engine.kernels.attention import activation_stride, attend
from kvferry.engine.kernels.experts import mixture
from kvferry.engine.kernels.feed_forward import gated_units
from kvferry.engine.kernels.intrinsics import (
    add_floats,
    copy_bytes,
    load_int,
    load_int32,
    norm_floats,
    norm_quantise,
    rope,
)
from kvferry.engine.kernels.jit import glue, kernel
from kvferry.engine.kernels.kv_rows import store_key, store_value, tile_bytes
from kvferry.engine.kernels.layout import FLOAT_BYTES, KV_BLOCK, QUANT_BLOCK
from kvferry.engine.kernels.linear import UNIT_ROWS, linear, unpack_row
from kvferry.engine.kernels.sync import await_step, barrier
from kvferry.engine.kernels.work import portion_of, take

# Up to this many rows every thread computes the norms for itself: that is cheaper than a barrier.
PRIVATE_ROWS: Final = 4
# Counters that a step takes work from: one per phase and layer that hands out work, one for the head.
PHASES_PER_LAYER: Final = 5
_ONE: Final = np.float32(1.0)


@glue
def _embed(model: Any, workspace: Any, step: Any, thread: int, n_threads: int) -> None:
    n_blocks = model.hidden_size // QUANT_BLOCK
    for row in range(thread, step.n_rows, n_threads):
        token = load_int32(step.tokens_at + 4 * row)
        row_bytes = model.hidden_size * FLOAT_BYTES
        target = workspace.hidden_at + row * row_bytes
        given = load_int(step.given_rows_at + 8 * row) if step.given_rows_at != 0 else 0
        if given != 0:
            copy_bytes(target, given, row_bytes)
        else:
            unpack_row(model.embedding_kind, model.embedding_at, n_blocks, token, target)


@glue
def _norm(
    model: Any, workspace: Any, rows_at: int, n_rows: int, weight_at: int, scratch: int, thread: int, n_threads: int
) -> int:
    """Norm and quantise rows of the residual stream; returns where they are. ``rows_at`` lists them, 0 means all."""
    private = n_rows <= PRIVATE_ROWS
    target = scratch + workspace.scratch_normed if private else workspace.normed_at
    stride = activation_stride(model.hidden_size)
    first, by = (0, 1) if private else (thread, n_threads)
    for i in range(first, n_rows, by):
        row = i if rows_at == 0 else load_int32(rows_at + 4 * i)
        norm_quantise(
            workspace.hidden_at + row * model.hidden_size * FLOAT_BYTES,
            weight_at,
            model.hidden_size // QUANT_BLOCK,
            model.rms_eps,
            target + i * stride,
        )
    if not private:
        barrier(workspace.control_at, n_threads)
    return target


@kernel
def _kv_tile(model: Any, workspace: Any, step: Any, layer: int, row: int, head: int, which: int) -> int:
    """Address of the K (which = 0) or V (which = 1) tile that a row's KV head goes to."""
    position = load_int32(step.positions_at + 4 * row)
    block = load_int32(load_int(step.block_tables_at + 8 * row) + 4 * (position // KV_BLOCK))
    tile = ((block * model.n_layers + layer) * 2 + which) * model.n_kv_heads + head
    return workspace.kv_pool_at + tile * tile_bytes(workspace.kv_kind, model.head_dim)


@kernel
def _finish_head(head: int, bias: int, norm: int, n_blocks: int, epsilon: np.float32) -> None:
    """Between the projection of a q or k head and its rope: the bias, then the norm; 0 where a model has none."""
    if bias != 0:
        add_floats(head, bias, n_blocks)
    if norm != 0:
        norm_floats(head, norm, n_blocks, epsilon, head)


@kernel
def _bias_of(bias: int, head: int, head_dim: int) -> int:
    return bias + head * head_dim * FLOAT_BYTES if bias != 0 else 0


@glue
def _query_heads(model: Any, workspace: Any, step: Any, layer: Any, normed: int, first_head: int, n_heads: int) -> None:
    head_bytes = model.head_dim * FLOAT_BYTES
    row_bytes = model.n_heads * head_bytes
    units = model.head_dim // UNIT_ROWS
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride = activation_stride(model.hidden_size)
    query = workspace.query_at + first_head * head_bytes
    linear(
        layer.q_kind, layer.q_at, n_blocks, first_head * units, n_heads * units,
        normed, stride, step.n_rows, query, row_bytes, np.int64(0),
    )  # fmt: skip
    for row in range(step.n_rows):
        table = load_int(step.rope_rows_at + 8 * row)
        for head in range(n_heads):
            at = query + row * row_bytes + head * head_bytes
            bias = _bias_of(layer.q_bias_at, first_head + head, model.head_dim)
            _finish_head(at, bias, layer.q_norm_at, model.head_dim // QUANT_BLOCK, model.rms_eps)
            rope(at, table, model.head_dim // 2, model.query_scale, at)


@glue
def _key_heads(
    model: Any, workspace: Any, step: Any, layer: Any, layer_index: int, normed: int, first: int, n: int, scratch: int
) -> None:
    head_bytes = model.head_dim * FLOAT_BYTES
    units = model.head_dim // UNIT_ROWS
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride = activation_stride(model.hidden_size)
    keys = scratch + workspace.scratch_linear
    linear(
        layer.k_kind, layer.k_at, n_blocks, first * units, n * units,
        normed, stride, step.n_rows, keys, n * head_bytes, np.int64(0),
    )  # fmt: skip
    for row in range(step.n_rows):
        table = load_int(step.rope_rows_at + 8 * row)
        slot = load_int32(step.positions_at + 4 * row) % KV_BLOCK
        for head in range(n):
            key = keys + (row * n + head) * head_bytes
            bias = _bias_of(layer.k_bias_at, first + head, model.head_dim)
            _finish_head(key, bias, layer.k_norm_at, model.head_dim // QUANT_BLOCK, model.rms_eps)
            rope(key, table, model.head_dim // 2, _ONE, key)
            tile = _kv_tile(model, workspace, step, layer_index, row, first + head, np.int64(0))
            narrow = scratch + workspace.scratch_tile_keys
            store_key(workspace.kv_kind, key, model.head_dim, tile, slot, narrow)


@glue
def _value_heads(
    model: Any, workspace: Any, step: Any, layer: Any, layer_index: int, normed: int, first: int, n: int, scratch: int
) -> None:
    head_bytes = model.head_dim * FLOAT_BYTES
    units = model.head_dim // UNIT_ROWS
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride = activation_stride(model.hidden_size)
    values = scratch + workspace.scratch_linear
    linear(
        layer.v_kind, layer.v_at, n_blocks, first * units, n * units,
        normed, stride, step.n_rows, values, n * head_bytes, np.int64(0),
    )  # fmt: skip
    for row in range(step.n_rows):
        slot = load_int32(step.positions_at + 4 * row) % KV_BLOCK
        for head in range(n):
            tile = _kv_tile(model, workspace, step, layer_index, row, first + head, np.int64(1))
            value = values + (row * n + head) * head_bytes
            if layer.v_bias_at != 0:
                add_floats(value, layer.v_bias_at + (first + head) * head_bytes, model.head_dim // QUANT_BLOCK)
            store_value(workspace.kv_kind, value, model.head_dim, tile, slot)


@glue
def _project_heads(
    model: Any,
    workspace: Any,
    step: Any,
    layer: Any,
    layer_index: int,
    normed: int,
    scratch: int,
    phase: int,
    n_threads: int,
) -> None:
    """A unit is one head, of the sequence q heads, k heads, v heads."""
    n_q, n_kv = model.n_heads, model.n_kv_heads
    n_units = n_q + 2 * n_kv
    portion = portion_of(n_units, step.n_rows, n_threads)
    first = take(workspace, phase, portion)
    while first < n_units:
        end = min(first + portion, n_units)
        if first < n_q:
            _query_heads(model, workspace, step, layer, normed, first, min(end, n_q) - first)
        begin, stop = max(first - n_q, 0), min(end - n_q, n_kv)
        if begin < stop:
            _key_heads(model, workspace, step, layer, layer_index, normed, begin, stop - begin, scratch)
        begin, stop = max(first - n_q - n_kv, 0), end - n_q - n_kv
        if begin < stop:
            _value_heads(model, workspace, step, layer, layer_index, normed, begin, stop - begin, scratch)
        first = take(workspace, phase, portion)


@glue
def _attention(
    model: Any, workspace: Any, step: Any, layer_index: int, scratch: int, phase: int, n_threads: int
) -> None:
    """An item is one KV head of one tile. Tiles go from the last to the first: the later a tile, the more keys it has,
    and long work should start early.

    The last items, of which not every thread gets one, are cut into parts of their query heads, so that one long
    sequence keeps all threads busy. Never into parts of the keys: those are one sum.
    """
    group = model.n_heads // model.n_kv_heads
    n_items = step.n_tiles * model.n_kv_heads
    left = n_items % n_threads
    n_parts = min(group, (n_threads + left - 1) // left) if left > 0 else 1
    n_whole = n_items - left
    n_takes = n_whole + left * n_parts
    taken = take(workspace, phase, np.int64(1))
    while taken < n_takes:
        item, first, end = taken, 0, group
        if taken >= n_whole:
            item = n_whole + (taken - n_whole) // n_parts
            part = (taken - n_whole) % n_parts
            first, end = part * group // n_parts, (part + 1) * group // n_parts
        tile = step.n_tiles - 1 - item // model.n_kv_heads
        attend(model, workspace, step, layer_index, tile, item % model.n_kv_heads, first, end, scratch)
        taken = take(workspace, phase, np.int64(1))


@glue
def _add_to_hidden(
    model: Any, workspace: Any, step: Any, kind: int, weights: int, x: int, n_inputs: int, phase: int, n_threads: int
) -> None:
    """hidden += linear(x): the o and down projections. A unit is 32 outputs."""
    n_units = model.hidden_size // UNIT_ROWS
    row_bytes = model.hidden_size * FLOAT_BYTES
    n_blocks = n_inputs // QUANT_BLOCK
    stride = activation_stride(n_inputs)
    portion = portion_of(n_units, step.n_rows, n_threads)
    first = take(workspace, phase, portion)
    while first < n_units:
        n = min(portion, n_units - first)
        target = workspace.hidden_at + first * UNIT_ROWS * FLOAT_BYTES
        linear(kind, weights, n_blocks, first, n, x, stride, step.n_rows, target, row_bytes, np.int64(1))
        first = take(workspace, phase, portion)


@glue
def _gate_and_up(
    model: Any, workspace: Any, step: Any, layer: Any, normed: int, scratch: int, phase: int, n_threads: int
) -> None:
    """silu(gate) * up, quantised into the rows that down reads. A unit is 32 outputs of both."""
    n_units = model.ffn_size // UNIT_ROWS
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride = activation_stride(model.hidden_size)
    portion = portion_of(n_units, step.n_rows, n_threads)
    first = take(workspace, phase, portion)
    while first < n_units:
        gated_units(
            layer.gate_kind, layer.gate_at, layer.up_kind, layer.up_at,
            n_blocks, first, min(portion, n_units - first), n_units,
            normed, stride, step.n_rows, workspace.gated_at, scratch + workspace.scratch_linear,
        )  # fmt: skip
        first = take(workspace, phase, portion)


@glue
def _add_deepstack(model: Any, workspace: Any, step: Any, index: int, thread: int, n_threads: int) -> None:
    """Add what the vision tower made for this layer to the rows of image tokens."""
    row_bytes = model.hidden_size * FLOAT_BYTES
    for row in range(thread, step.n_rows, n_threads):
        features = load_int(step.deepstack_at + 8 * row)
        if features != 0:
            source = features + index * row_bytes
            add_floats(workspace.hidden_at + row * row_bytes, source, model.hidden_size // QUANT_BLOCK)


@glue
def _logits(model: Any, workspace: Any, step: Any, normed: int, phase: int, n_threads: int) -> None:
    """A unit is 32 tokens of the vocabulary; logit rows are as wide as all units."""
    n_units = (model.vocab_size + UNIT_ROWS - 1) // UNIT_ROWS
    n_blocks = model.hidden_size // QUANT_BLOCK
    stride = activation_stride(model.hidden_size)
    row_bytes = n_units * UNIT_ROWS * FLOAT_BYTES
    portion = portion_of(n_units, step.n_logit_rows, n_threads)
    first = take(workspace, phase, portion)
    while first < n_units:
        n = min(portion, n_units - first)
        target = step.logits_at + first * UNIT_ROWS * FLOAT_BYTES
        linear(
            model.head_kind, model.head_at, n_blocks, first, n,
            normed, stride, step.n_logit_rows, target, row_bytes, np.int64(0),
        )  # fmt: skip
        first = take(workspace, phase, portion)


@glue
def forward(models: Any, layers: Any, workspaces: Any, steps: Any, thread: int, n_threads: int) -> None:
    """Run one step (records.py). All threads of the step must call it; each returns when the step is done."""
    model, workspace, step = models[0], workspaces[0], steps[0]
    control = workspace.control_at
    scratch = workspace.scratch_at + thread * workspace.scratch_stride
    _embed(model, workspace, step, thread, n_threads)
    barrier(control, n_threads)
    attended_size = model.n_heads * model.head_dim
    for index in range(model.n_layers):
        layer = layers[index]
        phase = index * PHASES_PER_LAYER
        normed = _norm(model, workspace, 0, step.n_rows, layer.attention_norm_at, scratch, thread, n_threads)
        _project_heads(model, workspace, step, layer, index, normed, scratch, phase, n_threads)
        barrier(control, n_threads)
        _attention(model, workspace, step, index, scratch, phase + 1, n_threads)
        barrier(control, n_threads)
        attended = workspace.attended_at
        _add_to_hidden(model, workspace, step, layer.o_kind, layer.o_at, attended, attended_size, phase + 2, n_threads)
        barrier(control, n_threads)
        if layer.router_at != 0:
            mixture(model, workspace, step, layer, scratch, phase + 3, thread, n_threads)
        else:
            normed = _norm(model, workspace, 0, step.n_rows, layer.ffn_norm_at, scratch, thread, n_threads)
            _gate_and_up(model, workspace, step, layer, normed, scratch, phase + 3, n_threads)
            barrier(control, n_threads)
            gated, size = workspace.gated_at, model.ffn_size
            _add_to_hidden(model, workspace, step, layer.down_kind, layer.down_at, gated, size, phase + 4, n_threads)
        barrier(control, n_threads)
        if index < step.n_deepstack:
            _add_deepstack(model, workspace, step, index, thread, n_threads)
            barrier(control, n_threads)
    if step.n_logit_rows > 0:
        rows_at = step.logit_rows_at
        normed = _norm(model, workspace, rows_at, step.n_logit_rows, model.output_norm_at, scratch, thread, n_threads)
        _logits(model, workspace, step, normed, model.n_layers * PHASES_PER_LAYER, n_threads)
    # Thread 0 rewrites the records for the next step as soon as it is through here: none may be read behind it.
    barrier(control, n_threads)


@kernel
def run_steps(models: Any, layers: Any, workspaces: Any, steps: Any, thread: int, n_threads: int, seen: int) -> int:
    """Thread 0 runs the current step. The others run every step announced after step number ``seen`` until none comes
    for a while. Returns the number of the last step run.

    A worker thread lives in here while the engine is busy, so that it needs the interpreter's lock neither to start nor
    to end a step.
    """
    control = workspaces[0].control_at
    while thread == 0 or await_step(control, seen):
        seen += 1
        if steps[0].n_rows == 0:  # the step that says: stop
            break
        forward(models, layers, workspaces, steps, thread, n_threads)
        if thread == 0:
            break
    return seen
