"""The memory that steps work in, and the record that tells the jitted code where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.kernels import records
from kvferry.engine.kernels.attention import TILE_ROWS
from kvferry.engine.kernels.attention_ir import RESCALE_LANES
from kvferry.engine.kernels.forward import LOGITS_PORTIONS
from kvferry.engine.kernels.layout import CACHE_LINE, FLOAT_BYTES, KV_BLOCK, activation_row_bytes
from kvferry.engine.kernels.linear import UNIT_ROWS
from kvferry.engine.kernels.work import CLOCK_BYTES, LONGEST_RUN, MOST_PORTIONS, RETRIED_ROWS
from kvferry.engine.kv_cache import KvKind, KvPool
from kvferry.engine.memory import huge_empty
from kvferry.engine.weight_plan import whole_blocks


class Workspace:
    """Room for steps of up to ``max_rows`` rows by ``n_threads`` threads."""

    def __init__(self, config: ModelConfig, max_rows: int, n_threads: int, pool: KvPool, kv: KvKind) -> None:
        query_size = config.n_heads * config.head_dim
        self.record: NDArray[Any] = np.zeros(1, records.WORKSPACE)
        sizes = {
            "hidden_at": max_rows * config.hidden_size * FLOAT_BYTES,
            "query_at": max_rows * query_size * FLOAT_BYTES,
            "normed_at": max_rows * activation_row_bytes(config.hidden_size),
            "attended_at": max_rows * activation_row_bytes(query_size),
            "gated_at": max_rows * activation_row_bytes(whole_blocks(config.ffn_size)),
            **_expert_sizes(config, max_rows),
        }
        stride = self._lay_out_scratch(config, max_rows)
        self.record["scratch_stride"] = stride
        self._region = self._lay_out({**sizes, "scratch_at": stride * n_threads})
        self.record["kv_pool_at"] = pool.tiles.ctypes.data
        self.record["kv_kind"] = kv.code

    def _lay_out(self, sizes: dict[str, int]) -> NDArray[np.uint8]:
        """One region for all of it, each field on a cache line of its own."""
        offsets, end = {}, 0
        for field, n_bytes in sizes.items():
            offsets[field] = end
            end += _whole_lines(n_bytes)
        region = huge_empty(end)
        for field, offset in offsets.items():
            self.record[field] = region.ctypes.data + offset
        return region

    def _lay_out_scratch(self, config: ModelConfig, rows: int) -> int:
        """Set the offsets of one thread's scratch memory; returns its size."""
        group = config.n_heads // config.n_kv_heads
        tile_rows = max(TILE_ROWS, group)
        n_experts, n_active = (config.moe.n_experts, config.moe.n_active) if config.moe is not None else (0, 0)
        sizes = {
            "scratch_clock": CLOCK_BYTES,
            "scratch_linear": _linear_floats(config, rows) * FLOAT_BYTES,
            "scratch_normed": RETRIED_ROWS * activation_row_bytes(config.hidden_size),
            "scratch_row": (config.hidden_size + n_experts) * FLOAT_BYTES,
            "scratch_choice": activation_row_bytes(config.hidden_size) + n_active * (4 + FLOAT_BYTES),
            "scratch_tile_query": tile_rows * config.head_dim * FLOAT_BYTES,
            "scratch_tile_output": tile_rows * config.head_dim * FLOAT_BYTES,
            "scratch_tile_scores": tile_rows * KV_BLOCK * FLOAT_BYTES,
            "scratch_tile_sums": tile_rows * KV_BLOCK * FLOAT_BYTES,
            "scratch_tile_maxima": (tile_rows + RESCALE_LANES) * FLOAT_BYTES,
            "scratch_tile_rescales": (tile_rows + RESCALE_LANES) * FLOAT_BYTES,
            "scratch_tile_keys": config.head_dim * KV_BLOCK * FLOAT_BYTES,
            "scratch_tile_values": config.head_dim * KV_BLOCK * FLOAT_BYTES,
        }
        offset = 0
        for field, n_bytes in sizes.items():
            self.record[field] = offset
            offset += _whole_lines(n_bytes)
        return offset


def _whole_lines(n_bytes: int) -> int:
    return -(-n_bytes // CACHE_LINE) * CACHE_LINE


def _linear_floats(config: ModelConfig, rows: int) -> int:
    """Most outputs that a thread holds aside: of one row a whole layer's, of many rows those of a portion."""
    all_heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    ffn_size = max(config.ffn_size, config.moe.ffn_size if config.moe is not None else 0)
    one_row = max(2 * whole_blocks(ffn_size), all_heads, config.hidden_size, config.vocab_size // LOGITS_PORTIONS)
    runs = max(_run_outputs(config.vocab_size), _run_outputs(config.hidden_size), 2 * _run_outputs(ffn_size))
    retried = RETRIED_ROWS * max(runs, LONGEST_RUN * config.head_dim)
    return max(one_row + UNIT_ROWS, retried, rows * max(2 * _portion_outputs(ffn_size), config.head_dim))


def _portion_outputs(n_outputs: int) -> int:
    """Outputs of a portion of a step with several rows (work.portion_size)."""
    n_units = -(-n_outputs // UNIT_ROWS)
    return -(-n_units // MOST_PORTIONS) * UNIT_ROWS


def _run_outputs(n_outputs: int) -> int:
    """Most outputs of a portion of a step with a few rows (work.run_size)."""
    return max(_portion_outputs(n_outputs), LONGEST_RUN * UNIT_ROWS)


def _expert_sizes(config: ModelConfig, rows: int) -> dict[str, int]:
    moe = config.moe
    if moe is None:
        return {}
    places = rows * moe.n_active
    # A late thread may read (and drop) rows from the last place on.
    read_places = places + RETRIED_ROWS
    return {
        **dict.fromkeys(("chosen_at", "chosen_weights_at", "places_at"), places * 4),
        "expert_ends_at": moe.n_experts * 4,
        "active_at": (moe.n_experts + 1) * 4,
        "gathered_at": read_places * activation_row_bytes(config.hidden_size),
        "expert_gated_at": read_places * activation_row_bytes(whole_blocks(moe.ffn_size)),
        "expert_out_at": read_places * config.hidden_size * FLOAT_BYTES,
    }
