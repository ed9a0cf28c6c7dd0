"""The phase that projects a layer's q, k and v heads, and puts K and V into the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.engine.kernels.attention import activation_stride
from kvferry.engine.kernels.intrinsics import add_floats, load_int, load_int32, norm_floats, rope
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.kv_rows import store_key, store_value, tile_bytes
from kvferry.engine.kernels.layout import FLOAT_BYTES, KV_BLOCK, QUANT_BLOCK
from kvferry.engine.kernels.linear import UNIT_ROWS, linear
from kvferry.engine.kernels.work import claim, finish, next_portion, open_phase, run_size

_ONE = np.float32(1.0)


@kernel
def _kv_tile(model: Any, workspace: Any, step: Any, layer: int, row: int, head: int, which: int) -> int:
    """Address of the K (which = 0) or V (which = 1) tile that a row's KV head goes to."""
    position = load_int32(step.positions_at + 4 * row)
    block = load_int32(load_int(step.block_tables_at + 8 * row) + 4 * (position // KV_BLOCK))
    tile = ((block * model.n_layers + layer) * 2 + which) * model.n_kv_heads + head
    return workspace.kv_pool_at + tile * tile_bytes(workspace.kv_kind, model.head_dim)


@kernel
def _finish_heads(aside: int, n_heads: int, bias: int, norm: int, run: Any) -> None:
    """Heads of one row between their projection and their rope: the biases, then the norm; 0 where a model has none."""
    n_blocks = run.model.head_dim // QUANT_BLOCK
    if bias != 0:
        add_floats(aside, bias, n_heads * n_blocks)
    if norm != 0:
        for head in range(n_heads):
            at = aside + head * run.model.head_dim * FLOAT_BYTES
            norm_floats(at, norm, n_blocks, run.model.rms_eps, at)


@kernel
def _project(run: Any, kind: int, weights: int, normed: int, first: int, n: int, aside: int, width: int) -> None:
    """Heads [first, first + n) of one of the projections, for all rows; these are ``width`` bytes apart."""
    units = run.model.head_dim // UNIT_ROWS
    n_blocks = run.model.hidden_size // QUANT_BLOCK
    stride = activation_stride(run.model.hidden_size)
    linear(
        kind, weights, n_blocks, first * units, n * units,
        normed, stride, run.step.n_rows, aside, width, np.int64(0),
    )  # fmt: skip


@kernel
def _store_row(run: Any, layer_index: int, row: int, first: int, end: int, aside: int) -> None:
    """Heads [first, end) of one row, roped, into the queries and the cache."""
    model, workspace, step = run.model, run.workspace, run.step
    head_bytes = model.head_dim * FLOAT_BYTES
    table = load_int(step.rope_rows_at + 8 * row)
    slot = load_int32(step.positions_at + 4 * row) % KV_BLOCK
    for head in range(first, end):
        at = aside + (head - first) * head_bytes
        if head < model.n_heads:
            query = workspace.query_at + (row * model.n_heads + head) * head_bytes
            rope(at, table, model.head_dim // 2, model.query_scale, query)
        elif head < model.n_heads + model.n_kv_heads:
            rope(at, table, model.head_dim // 2, _ONE, at)
            tile = _kv_tile(model, workspace, step, layer_index, row, head - model.n_heads, np.int64(0))
            narrow = run.scratch + workspace.scratch_tile_keys
            store_key(workspace.kv_kind, at, model.head_dim, tile, slot, narrow)
        else:
            kv_head = head - model.n_heads - model.n_kv_heads
            tile = _kv_tile(model, workspace, step, layer_index, row, kv_head, np.int64(1))
            store_value(workspace.kv_kind, at, model.head_dim, tile, slot)


@kernel
def project_heads(run: Any, layer: Any, layer_index: int, normed: int, begin: int, stop: int, number: int) -> None:
    """Heads [begin, stop) of the sequence q heads, k heads, v heads. A unit is one head."""
    n_q, n_kv = run.model.n_heads, run.model.n_kv_heads
    n_rows = run.step.n_rows
    head_bytes = run.model.head_dim * FLOAT_BYTES
    size = run_size(stop - begin, n_rows, run.n_threads)
    phase = open_phase(run, number, (stop - begin + size - 1) // size, n_rows)
    aside = run.scratch + run.workspace.scratch_linear
    portion = next_portion(phase)
    while portion >= 0:
        first = begin + portion * size
        end = min(first + size, stop)
        width = (end - first) * head_bytes
        n = min(end, n_q) - first
        if n > 0:
            _project(run, layer.q_kind, layer.q_at, normed, first, n, aside, width)
            bias = layer.q_bias_at + first * head_bytes if layer.q_bias_at != 0 else 0
            for row in range(n_rows):
                _finish_heads(aside + row * width, n, bias, layer.q_norm_at, run)
        low, high = max(first, n_q), min(end, n_q + n_kv)
        if low < high:
            keys = aside + (low - first) * head_bytes
            _project(run, layer.k_kind, layer.k_at, normed, low - n_q, high - low, keys, width)
            bias = layer.k_bias_at + (low - n_q) * head_bytes if layer.k_bias_at != 0 else 0
            for row in range(n_rows):
                _finish_heads(keys + row * width, high - low, bias, layer.k_norm_at, run)
        low = max(first, n_q + n_kv)
        if low < end:
            values = aside + (low - first) * head_bytes
            kv_head = low - n_q - n_kv
            _project(run, layer.v_kind, layer.v_at, normed, kv_head, end - low, values, width)
            bias = layer.v_bias_at + kv_head * head_bytes if layer.v_bias_at != 0 else 0
            for row in range(n_rows):
                _finish_heads(values + row * width, end - low, bias, np.int64(0), run)
        if claim(phase, portion):
            for row in range(n_rows):
                _store_row(run, layer_index, row, first, end, aside + row * width)
            finish(phase)
        portion = next_portion(phase)
