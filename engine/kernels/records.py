"""The plain records that describe a model, its workspace and one step to the jitted code.

Each is a numpy structured array of length 1 (``LAYER``: one per layer), passed as it is: jitted code reads the fields
by name. ``*_at`` fields are addresses; whoever fills them in keeps the arrays behind them alive. A matrix's ``*_kind``
is one of the kinds of packed weights (layout.py) where models are packed, and that kind's kernels, which
``linear.with_kernels`` puts in its place, where jitted code reads it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

MODEL: Final = np.dtype(
    [
        ("n_layers", np.int64),
        ("hidden_size", np.int64),
        ("ffn_size", np.int64),
        ("n_heads", np.int64),
        ("n_kv_heads", np.int64),
        ("head_dim", np.int64),
        ("vocab_size", np.int64),
        ("rms_eps", np.float32),
        ("query_scale", np.float32),  # 1 / sqrt(head_dim), multiplied into q after rope
        ("embedding_at", np.int64),  # packed weights [vocab, hidden]
        ("embedding_kind", np.int64),
        ("output_norm_at", np.int64),  # float32 [hidden]
        ("head_at", np.int64),  # packed weights [vocab, hidden]
        ("head_kind", np.int64),
        ("n_experts", np.int64),  # of sparse layers; 0 when there are none
        ("n_active", np.int64),  # experts that a token goes through
        ("expert_size", np.int64),  # elements inside an expert, whole units
        ("normalise", np.int64),  # 1: the chosen experts' weights are divided by their sum
        ("head_pages_at", np.int64),  # streamed: the pages to let go of behind the logits; else no bytes
        ("head_pages_bytes", np.int64),
    ]
)

LAYER: Final = np.dtype(
    [("attention_norm_at", np.int64), ("ffn_norm_at", np.int64)]
    # float32 [heads * head_dim] and [head_dim]; 0 where the model has none
    + [(f"{name}_at", np.int64) for name in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")]
    # In a sparse layer gate, up and down are the experts', one after the other, and router_at is float32 [experts,
    # hidden]; in a dense one router_at is 0.
    + [("router_at", np.int64)]
    # Streamed: the pages of the layer, to let go of behind it; else no bytes.
    + [("pages_at", np.int64), ("pages_bytes", np.int64)]
    + [
        (f"{tensor}_{field}", np.int64)
        for tensor in ("q", "k", "v", "o", "gate", "up", "down")
        for field in ("at", "kind")
    ]
)

WORKSPACE: Final = np.dtype(
    [
        ("hidden_at", np.int64),  # float32 [rows, hidden]: the residual stream
        ("query_at", np.int64),  # float32 [rows, n_heads * head_dim], roped and scaled
        ("normed_at", np.int64),  # activation rows [rows] of hidden elements
        ("attended_at", np.int64),  # activation rows [rows] of n_heads * head_dim elements
        ("gated_at", np.int64),  # activation rows [rows] of ffn elements
        # Sparse layers; a place is one row at one of its experts, ordered by expert, then row.
        ("chosen_at", np.int64),  # int32 [rows, active]: experts, best first
        ("chosen_weights_at", np.int64),  # float32 [rows, active]
        ("places_at", np.int64),  # int32 [rows, active]: place of each choice
        ("expert_ends_at", np.int64),  # int32 [experts]: the place behind each expert's last
        ("active_at", np.int64),  # int32 [1 + experts]: how many experts have rows, and which
        ("gathered_at", np.int64),  # activation rows [places] of hidden elements
        ("expert_gated_at", np.int64),  # activation rows [places] of expert elements
        ("expert_out_at", np.int64),  # float32 [places, hidden]
        ("phases_at", np.int64),  # work.py: a line for each phase, ``phases_stride`` bytes for each slot
        ("phases_stride", np.int64),
        ("scratch_at", np.int64),  # one region per thread, ``scratch_stride`` bytes each; offsets in a region:
        ("scratch_stride", np.int64),
        ("scratch_clock", np.int64),  # work.py
        ("scratch_linear", np.int64),  # float32: a linear layer's outputs on their way through one thread
        ("scratch_normed", np.int64),  # activation rows of hidden elements on their way through one thread
        ("scratch_row", np.int64),  # float32 [hidden + experts]: a row on its way through router or mixture
        ("scratch_choice", np.int64),  # an activation row of hidden elements, and its experts: int32, float32 [active]
        ("scratch_tile_query", np.int64),  # float32 [tile rows, head_dim]
        ("scratch_tile_output", np.int64),  # float32 [tile rows, head_dim]
        ("scratch_tile_scores", np.int64),  # float32 [tile rows, 32]
        ("scratch_tile_sums", np.int64),  # float32 [tile rows, 32]
        ("scratch_tile_maxima", np.int64),  # float32 [tile rows]
        ("scratch_tile_rescales", np.int64),  # float32 [tile rows]
        ("scratch_tile_keys", np.int64),  # float32 [head_dim, 32]: a narrow K tile widened, or a head to be narrowed
        ("scratch_tile_values", np.int64),  # float32 [32, head_dim]: a narrow V tile widened
        ("kv_pool_at", np.int64),  # blocks of [n_layers, 2, n_kv_heads] tiles
        ("kv_kind", np.int64),  # of those tiles: KV_F32, KV_F16 or KV_Q8
        ("control_at", np.int64),  # sync.py
    ]
)

N_STEP_NUMBERS: Final = 4
# Two for each slot: all rows of a step, and those that go on behind the last layer's K and V because they get logits.
STEP: Final = np.dtype(
    [
        # The first N_STEP_NUMBERS change from step to step, the addresses behind them do not.
        ("n_rows", np.int64),
        ("n_tiles", np.int64),
        ("n_deepstack", np.int64),  # after so many first layers something is added to some rows
        ("logits_at", np.int64),  # float32 [n_rows, vocab] of rows that go on
        ("tokens_at", np.int64),  # int32 [n_rows]
        ("from_rows_at", np.int64),  # int32 [n_rows]: of rows that go on: which of all they are, ascending
        ("positions_at", np.int64),  # int32 [n_rows]
        ("rope_rows_at", np.int64),  # int64 [n_rows]: address of the row's float32 [2, head_dim / 2], cosines and sines
        ("given_rows_at", np.int64),  # int64 [n_rows]: address of float32 [hidden] instead of an embedding, or 0
        ("deepstack_at", np.int64),  # int64 [n_rows]: address of float32 [n_deepstack, hidden], or 0
        ("block_tables_at", np.int64),  # int64 [n_rows]: address of the row's sequence's int32 block numbers
        ("tile_starts_at", np.int64),  # int32 [n_tiles + 1]: rows of one sequence that attention takes together
    ]
)
