"""Attention for a tile of tokens of one sequence and one KV head, walking the sequence's blocks in order."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvferry.engine.kernels.attention_ir import LOWEST_SCORE
from kvferry.engine.kernels.intrinsics import (
    ISA,
    attention_output,
    load_float,
    load_int,
    load_int32,
    make_scores,
    make_weighted_values,
    softmax_step,
    store_float,
)
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.kv_rows import tile_bytes, widened_keys, widened_values
from kvferry.engine.kernels.layout import FLOAT_BYTES, KV_BLOCK, activation_row_bytes

# Query rows (tokens times the heads that share a KV head) of one tile: enough to use a K or V tile often while it is in
# the first cache, few enough that their own state stays there too.
TILE_ROWS: Final = 24

_LARGE: Final = ISA.attention_rows
_SCORE_BYTES: Final = KV_BLOCK * FLOAT_BYTES
_LOWEST: Final = np.float32(LOWEST_SCORE)

_scores_large: Final = make_scores(_LARGE)
_scores_three: Final = make_scores(3)
_scores_two: Final = make_scores(2)
_scores_one: Final = make_scores(1)
_values_large: Final = make_weighted_values(_LARGE)
_values_three: Final = make_weighted_values(3)
_values_two: Final = make_weighted_values(2)
_values_one: Final = make_weighted_values(1)

activation_stride: Final[Any] = kernel(activation_row_bytes)


def tile_tokens(group: int) -> int:
    """Tokens of a full tile when ``group`` query heads share a KV head."""
    return max(1, TILE_ROWS // group)


@kernel
def _all_scores(q: int, n_rows: int, head_dim: int, k_tile: int, scores: int) -> None:
    row_bytes = head_dim * FLOAT_BYTES
    row = 0
    while n_rows - row >= _LARGE:
        _scores_large(q + row * row_bytes, head_dim, k_tile, scores + row * _SCORE_BYTES)
        row += _LARGE
    while n_rows - row >= 3:
        _scores_three(q + row * row_bytes, head_dim, k_tile, scores + row * _SCORE_BYTES)
        row += 3
    if n_rows - row == 2:
        _scores_two(q + row * row_bytes, head_dim, k_tile, scores + row * _SCORE_BYTES)
    elif n_rows - row == 1:
        _scores_one(q + row * row_bytes, head_dim, k_tile, scores + row * _SCORE_BYTES)


@kernel
def _all_values(
    weights: int, n_rows: int, n_valid: int, v_tile: int, head_dim: int, rescales: int, output: int
) -> None:
    row_bytes = head_dim * FLOAT_BYTES
    row = 0
    while row < n_rows:
        w, r, y = weights + row * _SCORE_BYTES, rescales + row * FLOAT_BYTES, output + row * row_bytes
        left = n_rows - row
        if left >= _LARGE:
            _values_large(w, n_valid, v_tile, head_dim, r, y)
            row += _LARGE
        elif left >= 3:
            _values_three(w, n_valid, v_tile, head_dim, r, y)
            row += 3
        elif left == 2:
            _values_two(w, n_valid, v_tile, head_dim, r, y)
            row += 2
        else:
            _values_one(w, n_valid, v_tile, head_dim, r, y)
            row += 1


@kernel
def attend(
    model: Any,
    workspace: Any,
    step: Any,
    layer: int,
    tile: int,
    kv_head: int,
    first_in_group: int,
    end_in_group: int,
    scratch: int,
) -> None:
    """Heads [first_in_group, end_in_group) of those that share KV head ``kv_head``, for the rows of attention tile
    ``tile``. The result stays in ``scratch``, for ``store_attended``."""
    head_dim = model.head_dim
    head_bytes = head_dim * FLOAT_BYTES
    n_heads = end_in_group - first_in_group
    first_head = kv_head * (model.n_heads // model.n_kv_heads) + first_in_group
    first_row = load_int32(step.tile_starts_at + 4 * tile)
    n_tokens = load_int32(step.tile_starts_at + 4 * tile + 4) - first_row
    n_rows = n_tokens * n_heads
    first_position = load_int32(step.positions_at + 4 * first_row)
    block_table = load_int(step.block_tables_at + 8 * first_row)
    query = scratch + workspace.scratch_tile_query
    output = scratch + workspace.scratch_tile_output
    scores = scratch + workspace.scratch_tile_scores
    sums = scratch + workspace.scratch_tile_sums
    maxima = scratch + workspace.scratch_tile_maxima
    rescales = scratch + workspace.scratch_tile_rescales

    for token in range(n_tokens):
        source = workspace.query_at + ((first_row + token) * model.n_heads + first_head) * head_bytes
        for i in range(n_heads * head_dim):
            target = token * n_heads * head_bytes + i * FLOAT_BYTES
            store_float(query + target, load_float(source + i * FLOAT_BYTES))
            store_float(output + target, np.float32(0.0))
    for row in range(n_rows):
        store_float(maxima + row * FLOAT_BYTES, _LOWEST)
        for lane in range(KV_BLOCK):
            store_float(sums + row * _SCORE_BYTES + lane * FLOAT_BYTES, np.float32(0.0))

    kv_kind = workspace.kv_kind
    stored_bytes = tile_bytes(kv_kind, head_dim)
    for index in range((first_position + n_tokens - 1) // KV_BLOCK + 1):
        start = index * KV_BLOCK
        block = load_int32(block_table + 4 * index)
        stored = (
            workspace.kv_pool_at + ((block * model.n_layers + layer) * 2 * model.n_kv_heads + kv_head) * stored_bytes
        )
        k_tile = widened_keys(kv_kind, stored, head_dim, scratch + workspace.scratch_tile_keys)
        # Tokens before this block see nothing of it, the next ones part of it, those from its last position on all.
        first_token = max(0, start - first_position)
        first_full = min(n_tokens, max(first_token, start + KV_BLOCK - 1 - first_position))
        row = first_token * n_heads
        _all_scores(query + row * head_bytes, n_rows - row, head_dim, k_tile, scores + row * _SCORE_BYTES)
        for row in range(first_token * n_heads, n_rows):
            n_valid = min(KV_BLOCK, first_position + row // n_heads - start + 1)
            softmax_step(
                n_valid,
                scores + row * _SCORE_BYTES,
                maxima + row * FLOAT_BYTES,
                rescales + row * FLOAT_BYTES,
                sums + row * _SCORE_BYTES,
            )
        stored += model.n_kv_heads * stored_bytes
        v_tile = widened_values(kv_kind, stored, head_dim, scratch + workspace.scratch_tile_values)
        for token in range(first_token, first_full):
            row = token * n_heads
            _all_values(
                scores + row * _SCORE_BYTES,
                n_heads,
                first_position + token - start + 1,
                v_tile,
                head_dim,
                rescales + row * FLOAT_BYTES,
                output + row * head_bytes,
            )
        row = first_full * n_heads
        _all_values(
            scores + row * _SCORE_BYTES,
            n_rows - row,
            np.int64(KV_BLOCK),
            v_tile,
            head_dim,
            rescales + row * FLOAT_BYTES,
            output + row * head_bytes,
        )


@kernel
def store_attended(
    model: Any,
    workspace: Any,
    step: Any,
    tile: int,
    kv_head: int,
    first_in_group: int,
    end_in_group: int,
    scratch: int,
) -> None:
    """What ``attend`` has just computed with the same arguments, into quantised activation rows."""
    n_heads = end_in_group - first_in_group
    first_head = kv_head * (model.n_heads // model.n_kv_heads) + first_in_group
    first_row = load_int32(step.tile_starts_at + 4 * tile)
    n_rows = (load_int32(step.tile_starts_at + 4 * tile + 4) - first_row) * n_heads
    output = scratch + workspace.scratch_tile_output
    sums = scratch + workspace.scratch_tile_sums
    head_blocks = model.head_dim // KV_BLOCK
    n_blocks = model.n_heads * head_blocks
    stride = activation_stride(model.n_heads * model.head_dim)
    for row in range(n_rows):
        attention_output(
            output + row * model.head_dim * FLOAT_BYTES,
            head_blocks,
            sums + row * _SCORE_BYTES,
            workspace.attended_at + (first_row + row // n_heads) * stride,
            n_blocks,
            (first_head + row % n_heads) * head_blocks,
        )
