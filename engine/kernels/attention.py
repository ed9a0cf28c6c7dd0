"""Attention for a tile of tokens of one sequence and one KV head, walking the sequence's blocks in order."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvferry.engine.kernels.attention_ir import LOWEST_SCORE
from kvferry.engine.kernels.intrinsics import (
    ISA,
    attention_output,
    copy_bytes,
    load_int,
    load_int32,
    make_scores,
    make_weighted_values,
    rescales_of,
    row_maximum,
    row_weights,
    store_float,
)
from kvferry.engine.kernels.jit import glue, kernel
from kvferry.engine.kernels.kv_rows import tile_bytes, value_bytes, widened_keys, widened_values
from kvferry.engine.kernels.layout import FLOAT_BYTES, KV_BLOCK, activation_row_bytes
from kvferry.engine.kernels.work import claim, finish, next_portion, open_phase

_LARGE: Final = ISA.attention_rows
# Query rows (tokens times the heads that share a KV head) of one tile: enough to use a K or V tile often while it is in
# the first cache, few enough that their own state stays there too. The wider the registers, the sooner a K tile is used
# up, and the more rows it takes to be done with it no sooner than the next one has come from memory.
TILE_ROWS: Final = max(24, 4 * _LARGE)

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
def all_scores(q: int, n_rows: int, head_dim: int, k_tile: int, scores: int, ahead: int, ahead_step: int) -> None:
    """build_scores for any number of rows; each large tile of them asks for an equal share of what is ahead."""
    row_bytes = head_dim * FLOAT_BYTES
    if n_rows >= 2 * _LARGE:
        ahead_step //= n_rows // _LARGE
    row = 0
    while row < n_rows:
        x, s = q + row * row_bytes, scores + row * _SCORE_BYTES
        left = n_rows - row
        if left >= _LARGE:
            _scores_large(x, head_dim, k_tile, s, ahead, ahead_step)
            row += _LARGE
            ahead += head_dim * ahead_step
        elif left >= 3:
            _scores_three(x, head_dim, k_tile, s, ahead, ahead_step)
            row += 3
        elif left == 2:
            _scores_two(x, head_dim, k_tile, s, ahead, ahead_step)
            row += 2
        else:
            _scores_one(x, head_dim, k_tile, s, ahead, ahead_step)
            row += 1


@kernel
def softmax_step(n_rows: int, n_heads: int, n_valid: int, scores: int, maxima: int, rescales: int, sums: int) -> None:
    """One block's step of the online softmax for ``n_rows`` rows, which turns their scores into weights.

    The first ``n_heads`` rows see ``n_valid`` positions of the block, the next ones one more, and so on up to 32.
    """
    for row in range(n_rows):
        offset = row * FLOAT_BYTES
        row_maximum(
            min(KV_BLOCK, n_valid + row // n_heads), scores + row * _SCORE_BYTES, maxima + offset, rescales + offset
        )
    rescales_of(n_rows, maxima, rescales)
    for row in range(n_rows):
        offset = row * FLOAT_BYTES
        row_weights(
            min(KV_BLOCK, n_valid + row // n_heads),
            scores + row * _SCORE_BYTES,
            maxima + offset,
            rescales + offset,
            sums + row * _SCORE_BYTES,
        )


@kernel
def all_values(
    weights: int,
    n_rows: int,
    n_valid: int,
    v_tile: int,
    head_dim: int,
    rescales: int,
    output: int,
    ahead: int,
    ahead_step: int,
) -> None:
    """build_weighted_values for any number of rows; asks for what is ahead as all_scores does."""
    row_bytes = head_dim * FLOAT_BYTES
    if n_rows >= 2 * _LARGE:
        ahead_step //= n_rows // _LARGE
    row = 0
    while row < n_rows:
        w, r, y = weights + row * _SCORE_BYTES, rescales + row * FLOAT_BYTES, output + row * row_bytes
        left = n_rows - row
        if left >= _LARGE:
            _values_large(w, n_valid, v_tile, head_dim, r, y, ahead, ahead_step)
            row += _LARGE
            ahead += head_dim * ahead_step
        elif left >= 3:
            _values_three(w, n_valid, v_tile, head_dim, r, y, ahead, ahead_step)
            row += 3
        elif left == 2:
            _values_two(w, n_valid, v_tile, head_dim, r, y, ahead, ahead_step)
            row += 2
        else:
            _values_one(w, n_valid, v_tile, head_dim, r, y, ahead, ahead_step)
            row += 1


@kernel
def _begin_rows(n_rows: int, head_dim: int, output: int, maxima: int, sums: int) -> None:
    """What rows are before their first block."""
    for i in range(n_rows * head_dim):
        store_float(output + i * FLOAT_BYTES, np.float32(0.0))
    for i in range(n_rows * KV_BLOCK):
        store_float(sums + i * FLOAT_BYTES, np.float32(0.0))
    for row in range(n_rows):
        store_float(maxima + row * FLOAT_BYTES, _LOWEST)


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
        copy_bytes(query + token * n_heads * head_bytes, source, n_heads * head_bytes)
    _begin_rows(n_rows, head_dim, output, maxima, sums)

    kv_kind = workspace.kv_kind
    stored_bytes = tile_bytes(kv_kind, head_dim)
    ahead_step = value_bytes(kv_kind) * KV_BLOCK
    layer_bytes = 2 * model.n_kv_heads * stored_bytes
    in_block = layer * layer_bytes + kv_head * stored_bytes
    pool = workspace.kv_pool_at + in_block
    n_blocks = (first_position + n_tokens - 1) // KV_BLOCK + 1
    k_stored = pool + load_int32(block_table) * model.n_layers * layer_bytes
    for index in range(n_blocks):
        start = index * KV_BLOCK
        after = min(index + 1, n_blocks - 1)
        k_next = pool + load_int32(block_table + 4 * after) * model.n_layers * layer_bytes
        v_stored = k_stored + model.n_kv_heads * stored_bytes
        v_next = k_next + model.n_kv_heads * stored_bytes
        k_tile = widened_keys(kv_kind, k_stored, head_dim, scratch + workspace.scratch_tile_keys)
        # Tokens before this block see nothing of it, the next ones part of it, those from its last position on all.
        first_token = max(0, start - first_position)
        first_full = min(n_tokens, max(first_token, start + KV_BLOCK - 1 - first_position))
        row = first_token * n_heads
        all_scores(
            query + row * head_bytes,
            n_rows - row,
            head_dim,
            k_tile,
            scores + row * _SCORE_BYTES,
            k_next,
            ahead_step,
        )
        softmax_step(
            n_rows - row,
            n_heads,
            first_position + first_token - start + 1,
            scores + row * _SCORE_BYTES,
            maxima + row * FLOAT_BYTES,
            rescales + row * FLOAT_BYTES,
            sums + row * _SCORE_BYTES,
        )
        v_tile = widened_values(kv_kind, v_stored, head_dim, scratch + workspace.scratch_tile_values)
        for token in range(first_token, first_full):
            row = token * n_heads
            all_values(
                scores + row * _SCORE_BYTES,
                n_heads,
                first_position + token - start + 1,
                v_tile,
                head_dim,
                rescales + row * FLOAT_BYTES,
                output + row * head_bytes,
                v_next,
                ahead_step,
            )
        row = first_full * n_heads
        all_values(
            scores + row * _SCORE_BYTES,
            n_rows - row,
            np.int64(KV_BLOCK),
            v_tile,
            head_dim,
            rescales + row * FLOAT_BYTES,
            output + row * head_bytes,
            v_next,
            ahead_step,
        )
        k_stored = k_next


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
    row_blocks = model.n_heads * head_blocks
    stride = activation_stride(model.n_heads * model.head_dim)
    for row in range(n_rows):
        attention_output(
            output + row * model.head_dim * FLOAT_BYTES,
            head_blocks,
            sums + row * _SCORE_BYTES,
            workspace.attended_at + (first_row + row // n_heads) * stride,
            row_blocks,
            (first_head + row % n_heads) * head_blocks,
        )


@kernel
def _n_leading_decodes(step: Any) -> int:
    """How many tiles at the beginning are of a single token."""
    n = 0
    while (
        n < step.n_tiles and load_int32(step.tile_starts_at + 4 * n + 4) - load_int32(step.tile_starts_at + 4 * n) == 1
    ):
        n += 1
    return n


@glue
def attend_all(run: Any, layer_index: int, number: int) -> None:
    """The attention of a layer. An item is one KV head of one tile.

    The chunks of prompts go first, and a KV head's tiles one after the other, so that its keys stay in the second
    cache; from the last tile to the first: the later a tile, the more keys it has, and long work should start early.
    Single tokens that stand before the chunks in the batch come last and fill the gaps. The last of the first kind
    of items, of which not every thread gets one, are cut into parts of their query heads, so that one long sequence
    keeps all threads busy. Never into parts of the keys: those are one sum.
    """
    model, step = run.model, run.step
    group = model.n_heads // model.n_kv_heads
    n_small = _n_leading_decodes(step)
    n_large = step.n_tiles - n_small
    if n_large == 0:
        n_large, n_small = n_small, n_large
    left = n_large * model.n_kv_heads % run.n_threads
    n_parts = min(group, (run.n_threads + left - 1) // left) if left > 0 else 1
    n_whole = n_large * model.n_kv_heads - left
    n_of_chunks = n_whole + left * n_parts
    phase = open_phase(run, number, n_of_chunks + n_small * model.n_kv_heads, step.n_rows)
    portion = next_portion(phase)
    while portion >= 0:
        item, n_tiles, last, first, end = portion, n_large, step.n_tiles - 1, 0, group
        if portion >= n_of_chunks:
            item, n_tiles, last = portion - n_of_chunks, n_small, n_small - 1
        elif portion >= n_whole:
            item = n_whole + (portion - n_whole) // n_parts
            part = (portion - n_whole) % n_parts
            first, end = part * group // n_parts, (part + 1) * group // n_parts
        tile, kv_head = last - item % n_tiles, item // n_tiles
        attend(model, run.workspace, step, layer_index, tile, kv_head, first, end, run.scratch)
        if claim(phase, portion):
            store_attended(model, run.workspace, step, tile, kv_head, first, end, run.scratch)
            finish(phase)
        portion = next_portion(phase)
