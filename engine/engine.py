"""The engine: a model in memory, a KV pool, and one function that runs a mixed batch of rows through the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.errors import ContextExceeded, InvalidTokens, OutOfKvMemory, UnsupportedArchitecture
from kvferry.engine.files.gguf_file import open_gguf
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.fingerprint import fingerprint
from kvferry.engine.kernels import records
from kvferry.engine.kernels.attention import TILE_ROWS, tile_tokens
from kvferry.engine.kernels.forward import PHASES_PER_LAYER, PRIVATE_ROWS, run_steps
from kvferry.engine.kernels.intrinsics import ISA
from kvferry.engine.kernels.layout import CACHE_LINE, FLOAT_BYTES, KV_BLOCK, activation_row_bytes
from kvferry.engine.kernels.linear import UNIT_ROWS, with_kernels
from kvferry.engine.kernels.version import NUMERICS_VERSION
from kvferry.engine.kv_cache import KvGeometry, KvKind, KvPool, KvSequence
from kvferry.engine.memory import aligned_empty, huge_empty
from kvferry.engine.mrope import mrope_rows
from kvferry.engine.packing import PackedModel, Quant, pack_model
from kvferry.engine.text.model import TextModel
from kvferry.engine.threads import WorkerThreads, new_control
from kvferry.engine.vision.tower import VisionTower
from kvferry.engine.weight_plan import whole_blocks

_F32 = NDArray[np.float32]

_TOKENIZER_KEY: Final = "tokenizer.ggml.model"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``n_threads`` of a step; ``kv_bytes`` of KV memory; ``max_batch_rows`` that one pass takes (more are cut into
    several); ``context_length`` in tokens, at most (and by default) the model's own; ``quant``: what weights become
    that the kernels cannot take as they are stored; ``kv``: what the cache stores."""

    n_threads: int
    kv_bytes: int
    max_batch_rows: int = 512
    context_length: int | None = None
    quant: Quant = "q8"
    kv: KvKind = KvKind.F32


@dataclass(frozen=True, slots=True)
class Sight:
    """What tokens have beside their ids in a sequence with images.

    ``positions``: int32 [3, n], time, row and column of each of the chunk's tokens. ``image_rows``: int64 [m], which of
    them are image tokens; ``embeds`` float32 [m, hidden] stand in for their embeddings, ``deepstack`` float32
    [m, n_deepstack, hidden] is added to them after each of the first layers.
    """

    positions: NDArray[np.int32]
    image_rows: NDArray[np.int64]
    embeds: _F32
    deepstack: _F32


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to a sequence, and which of their rows get logits. ``sight``: None in a sequence of text."""

    sequence: KvSequence
    token_ids: NDArray[np.int32]
    logits: Literal["none", "last", "all"] = "last"
    sight: Sight | None = None


class Engine:
    """Not thread-safe: one thread at a time may call ``forward``. Sequences may be read and released from others."""

    def __init__(
        self, packed: PackedModel, options: EngineOptions, model_fingerprint: str, file: ModelFile | None = None
    ) -> None:
        config = packed.config
        self.config: Final = config
        self.fingerprint: Final = model_fingerprint
        self.kernel_path: Final = ISA.name
        self.n_threads: Final = options.n_threads
        self.context_length: Final = _context_length(config, options)
        self.geometry: Final = KvGeometry(config.n_layers, config.n_kv_heads, config.head_dim, kind=options.kv)
        self.pool: Final = KvPool(self.geometry, options.kv_bytes)
        self.max_batch_rows: Final = options.max_batch_rows
        self._packed = packed
        self._file = file
        self._workspace = _Workspace(config, options, self.pool)
        self._step: NDArray[Any] = np.zeros(1, records.STEP)
        self._records = (with_kernels(packed.model), with_kernels(packed.layers), self._workspace.record, self._step)
        self._workers = WorkerThreads(
            options.n_threads,
            lambda thread, seen: int(run_steps(*self._records, thread, options.n_threads, seen)),
            self._workspace.control,
        )

    @classmethod
    def load(cls, path: Path, options: EngineOptions) -> Engine:
        """Open a GGUF file or a checkpoint folder, pack its weights and get the kernels ready.

        Raises ModelNotFound, ModelInvalid or UnsupportedArchitecture for the model, OutOfKvMemory when ``kv_bytes`` is
        less than one block.
        """
        file = open_model(path)
        packed = pack_model(file, _context_length(file.config, options), options.quant)
        engine = cls(packed, options, _fingerprint(file, packed.recipe, options.kv), file)
        engine._warm_up()
        return engine

    @cached_property
    def tower(self) -> VisionTower:
        """The model's vision tower; packed when it is first asked for. UnsupportedArchitecture where there is none."""
        if self._file is None:
            raise UnsupportedArchitecture("this engine was made without the file that a vision tower is read from")
        return VisionTower(self._file, self.n_threads)

    def new_sequence(self) -> KvSequence:
        """An empty sequence. Release it when it is no longer needed."""
        return KvSequence(self.pool)

    def forward(self, chunks: Sequence[Chunk]) -> list[_F32]:
        """Append each chunk's tokens to its sequence; returns each chunk's logits, float32 [n_logit_rows, vocab].

        The rows of all chunks form one batch (or several, beyond ``max_batch_rows``). A sequence may occur once. Raises
        ContextExceeded, InvalidTokens or OutOfKvMemory before anything is computed; no sequence has changed then.
        """
        self._check(chunks)
        missing = sum(c.sequence.n_missing_blocks(c.sequence.n_rows + len(c.token_ids)) for c in chunks)
        if missing > self.pool.n_free_blocks:
            raise OutOfKvMemory(
                f"the batch needs {missing} KV blocks and {self.pool.n_free_blocks} of {self.pool.n_blocks} are free; "
                "release a sequence or give the engine more KV memory"
            )
        batch = _Batch(chunks, self._packed)
        for chunk in chunks:
            chunk.sequence.reserve(chunk.sequence.n_rows + len(chunk.token_ids))
        logits = np.empty((batch.n_logit_rows, -(-self.config.vocab_size // UNIT_ROWS) * UNIT_ROWS), np.float32)
        for start in range(0, batch.n_rows, self.max_batch_rows):
            self._run(batch, start, min(start + self.max_batch_rows, batch.n_rows), logits)
        for chunk in chunks:
            chunk.sequence.commit(chunk.sequence.n_rows + len(chunk.token_ids))
        return batch.split(logits[:, : self.config.vocab_size])

    def close(self) -> None:
        """End the worker threads. The engine computes nothing afterwards."""
        self._step["n_rows"] = 0
        self._workers.stop()

    def _run(self, batch: _Batch, start: int, stop: int, logits: _F32) -> None:
        arrays = batch.describe(start, stop, self._step, logits)
        self._workspace.counters[:] = 0
        self._workers.announce()
        run_steps(*self._records, 0, self.n_threads, 0)
        del arrays  # the step's record points into them until here

    def _warm_up(self) -> None:
        """Load the compiled kernels and touch the weights once, so that the first token is as fast as the next."""
        sequence = self.new_sequence()
        self.forward([Chunk(sequence, np.zeros(1, np.int32))])
        sequence.release()

    def _check(self, chunks: Sequence[Chunk]) -> None:
        if len({id(chunk.sequence) for chunk in chunks}) != len(chunks):
            raise InvalidTokens("a sequence occurs twice in one batch")
        for chunk in chunks:
            tokens = chunk.token_ids
            if tokens.ndim != 1 or len(tokens) == 0:
                raise InvalidTokens(f"a chunk holds at least one token, in one dimension; got shape {tokens.shape}")
            if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
                raise InvalidTokens(
                    f"token ids lie in 0 .. {self.config.vocab_size - 1}; got {tokens.min()} .. {tokens.max()}"
                )
            n_rows = chunk.sequence.n_rows + len(tokens)
            if n_rows > self.context_length:
                raise ContextExceeded(f"{n_rows} tokens are more than the context of {self.context_length} holds")


def _context_length(config: ModelConfig, options: EngineOptions) -> int:
    if options.context_length is None:
        return config.context_length
    return min(options.context_length, config.context_length)


def _fingerprint(file: ModelFile, recipe: str, kv: KvKind) -> str:
    return fingerprint(
        weights_sha256=file.weights_sha256(),
        config=file.config,
        quant_recipe=recipe,
        tokenizer_digest=_tokenizer_digest(file.path),
        kv_kind=kv.value,
        numerics_version=NUMERICS_VERSION,
    )


def _tokenizer_digest(path: Path) -> str:
    """The digest of the model's text part; what holds none is a model of bare token ids."""
    has_text = (path / "tokenizer.json").exists() if path.is_dir() else _TOKENIZER_KEY in open_gguf(path).metadata
    if not has_text:
        return "no tokenizer"
    return TextModel.load(path).digest


class _Batch:
    """All rows of some chunks in a line, described by arrays that a step's record points into."""

    def __init__(self, chunks: Sequence[Chunk], packed: PackedModel) -> None:
        config = packed.config
        self._chunks = chunks
        self._tile_tokens = tile_tokens(config.n_heads // config.n_kv_heads)
        lengths = [len(chunk.token_ids) for chunk in chunks]
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self.n_rows = int(self._ends[-1]) if lengths else 0
        self._tokens = _joined([chunk.token_ids for chunk in chunks])
        self._positions = _joined([np.arange(c.sequence.n_rows, c.sequence.n_rows + len(c.token_ids)) for c in chunks])
        self._logit_counts = [{"none": 0, "last": 1, "all": n}[c.logits] for c, n in zip(chunks, lengths, strict=True)]
        self._logit_rows = _joined(
            [np.arange(end - n, end) for end, n in zip(self._ends, self._logit_counts, strict=True)]
        )
        self.n_logit_rows = len(self._logit_rows)
        self._rope_rows = packed.rope.ctypes.data + self._positions.astype(np.int64) * packed.rope.strides[0]
        self._given: NDArray[np.int64] = np.zeros(self.n_rows, np.int64)
        self._deepstack: NDArray[np.int64] = np.zeros(self.n_rows, np.int64)
        self._n_deepstack = 0
        self._kept: list[NDArray[Any]] = []  # what those addresses point into
        for chunk, end in zip(chunks, self._ends, strict=True):
            if chunk.sight is not None:
                self._look(chunk.sight, int(end) - len(chunk.token_ids), packed)

    def _look(self, sight: Sight, first: int, packed: PackedModel) -> None:
        """Enter what a chunk whose rows begin at ``first`` has beside its tokens."""
        n = sight.positions.shape[1]
        turned = mrope_rows(packed.rope, sight.positions, packed.config.mrope_section or (0, 0, 0))
        embeds, deepstack = np.ascontiguousarray(sight.embeds), np.ascontiguousarray(sight.deepstack)
        self._kept += [turned, embeds, deepstack]
        self._rope_rows[first : first + n] = turned.ctypes.data + np.arange(n) * turned.strides[0]
        images = np.arange(len(sight.image_rows))
        self._given[first + sight.image_rows] = embeds.ctypes.data + images * embeds.strides[0]
        if len(images) and deepstack.shape[1]:
            self._deepstack[first + sight.image_rows] = deepstack.ctypes.data + images * deepstack.strides[0]
            self._n_deepstack = deepstack.shape[1]

    def describe(self, start: int, stop: int, step: NDArray[Any], logits: _F32) -> list[NDArray[Any]]:
        """Fill in the step's record for rows [start, stop); returns the arrays that it points into."""
        tables = [chunk.sequence.block_table for chunk in self._chunks]
        first_logit, end_logit = np.searchsorted(self._logit_rows, [start, stop])
        arrays: dict[str, NDArray[Any]] = {
            "tokens_at": self._tokens[start:stop],
            "positions_at": self._positions[start:stop],
            "rope_rows_at": self._rope_rows[start:stop],
            "given_rows_at": self._given[start:stop],
            "deepstack_at": self._deepstack[start:stop],
            "block_tables_at": self._table_addresses(tables)[start:stop],
            "tile_starts_at": self._tile_starts(start, stop),
            "logit_rows_at": self._logit_rows[first_logit:end_logit] - np.int32(start),
        }
        for field, array in arrays.items():
            step[field] = array.ctypes.data
        step["n_rows"] = stop - start
        step["n_deepstack"] = self._n_deepstack
        step["n_tiles"] = len(arrays["tile_starts_at"]) - 1
        step["n_logit_rows"] = end_logit - first_logit
        step["logits_at"] = logits.ctypes.data + int(first_logit) * logits.strides[0]
        return [*arrays.values(), *tables]

    def split(self, logits: _F32) -> list[_F32]:
        """Each chunk's own logits."""
        ends = np.cumsum(self._logit_counts)
        return [logits[end - n : end] for end, n in zip(ends, self._logit_counts, strict=True)]

    def _table_addresses(self, tables: list[NDArray[np.int32]]) -> NDArray[np.int64]:
        lengths = [len(chunk.token_ids) for chunk in self._chunks]
        return np.repeat(np.array([table.ctypes.data for table in tables], dtype=np.int64), lengths)

    def _tile_starts(self, start: int, stop: int) -> NDArray[np.int32]:
        """First row, counted from ``start``, of every attention tile, and the end of the last."""
        starts: list[int] = []
        first = 0
        for end in self._ends:
            starts.extend(range(max(first, start), min(int(end), stop), self._tile_tokens))
            first = int(end)
        return np.array([*starts, stop], dtype=np.int32) - np.int32(start)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)


class _Workspace:
    """The memory that steps work in, and the record that tells the jitted code where it lies."""

    def __init__(self, config: ModelConfig, options: EngineOptions, pool: KvPool) -> None:
        rows = options.max_batch_rows
        query_size = config.n_heads * config.head_dim
        self.record: NDArray[Any] = np.zeros(1, records.WORKSPACE)
        sizes = {
            "hidden_at": rows * config.hidden_size * FLOAT_BYTES,
            "query_at": rows * query_size * FLOAT_BYTES,
            "normed_at": rows * activation_row_bytes(config.hidden_size),
            "attended_at": rows * activation_row_bytes(query_size),
            "gated_at": rows * activation_row_bytes(whole_blocks(config.ffn_size)),
            **_expert_sizes(config, rows),
        }
        stride = self._lay_out_scratch(config, rows)
        self.record["scratch_stride"] = stride
        self._region = self._lay_out({**sizes, "scratch_at": stride * options.n_threads})
        self.record["kv_pool_at"] = pool.tiles.ctypes.data
        self.record["kv_kind"] = options.kv.code
        self.counters = aligned_empty((config.n_layers * PHASES_PER_LAYER + 1) * CACHE_LINE)
        self.record["counters_at"] = self.counters.ctypes.data
        self.control = new_control()
        self.record["control_at"] = self.control.ctypes.data

    def _lay_out(self, sizes: dict[str, int]) -> NDArray[np.uint8]:
        """One region for all of it, each field on a cache line of its own."""
        offsets, end = {}, 0
        for field, n_bytes in sizes.items():
            offsets[field] = end
            end += -(-n_bytes // CACHE_LINE) * CACHE_LINE
        region = huge_empty(end)
        for field, offset in offsets.items():
            self.record[field] = region.ctypes.data + offset
        return region

    def _lay_out_scratch(self, config: ModelConfig, rows: int) -> int:
        """Set the offsets of one thread's scratch memory; returns its size."""
        group = config.n_heads // config.n_kv_heads
        tile_rows = max(TILE_ROWS, group)
        n_experts, expert_size = (config.moe.n_experts, config.moe.ffn_size) if config.moe is not None else (0, 0)
        one_row = max(2 * whole_blocks(max(config.ffn_size, expert_size)), config.n_kv_heads * config.head_dim)
        many_rows = rows * max(2 * UNIT_ROWS, config.head_dim)
        sizes = {
            "scratch_linear": max(one_row, many_rows) * FLOAT_BYTES,
            "scratch_normed": PRIVATE_ROWS * activation_row_bytes(config.hidden_size),
            "scratch_row": (config.hidden_size + n_experts) * FLOAT_BYTES,
            "scratch_tile_query": tile_rows * config.head_dim * FLOAT_BYTES,
            "scratch_tile_output": tile_rows * config.head_dim * FLOAT_BYTES,
            "scratch_tile_scores": tile_rows * KV_BLOCK * FLOAT_BYTES,
            "scratch_tile_sums": tile_rows * KV_BLOCK * FLOAT_BYTES,
            "scratch_tile_maxima": tile_rows * FLOAT_BYTES,
            "scratch_tile_rescales": tile_rows * FLOAT_BYTES,
            "scratch_tile_keys": config.head_dim * KV_BLOCK * FLOAT_BYTES,
            "scratch_tile_values": config.head_dim * KV_BLOCK * FLOAT_BYTES,
        }
        offset = 0
        for field, n_bytes in sizes.items():
            self.record[field] = offset
            offset += -(-n_bytes // CACHE_LINE) * CACHE_LINE
        return offset


def _expert_sizes(config: ModelConfig, rows: int) -> dict[str, int]:
    moe = config.moe
    if moe is None:
        return {}
    places = rows * moe.n_active
    return {
        **dict.fromkeys(("chosen_at", "chosen_weights_at", "places_at"), places * 4),
        "expert_ends_at": moe.n_experts * 4,
        "active_at": (moe.n_experts + 1) * 4,
        "gathered_at": places * activation_row_bytes(config.hidden_size),
        "expert_gated_at": places * activation_row_bytes(whole_blocks(moe.ffn_size)),
        "expert_out_at": places * config.hidden_size * FLOAT_BYTES,
    }
