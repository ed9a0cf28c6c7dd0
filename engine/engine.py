"""The engine: a model in memory, a KV pool, and one function that runs a mixed batch of rows through the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.batch import Chunk, Sight, StepSlots
from kvferry.engine.config import ModelConfig
from kvferry.engine.cores import pin_this_thread
from kvferry.engine.errors import ContextExceeded, InvalidTokens, OutOfKvMemory, OutOfResources, UnsupportedArchitecture
from kvferry.engine.files.digest import Progress, no_progress
from kvferry.engine.files.gguf_file import open_gguf
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.fingerprint import fingerprint
from kvferry.engine.kernels.forward import run_steps
from kvferry.engine.kernels.intrinsics import ISA
from kvferry.engine.kernels.linear import UNIT_ROWS, with_kernels
from kvferry.engine.kernels.version import NUMERICS_VERSION
from kvferry.engine.kv_cache import KvGeometry, KvKind, KvPool, KvSequence
from kvferry.engine.packing import PackedModel, Quant
from kvferry.engine.text.model import TextModel
from kvferry.engine.threads import WorkerThreads
from kvferry.engine.vision.tower import VisionTower
from kvferry.engine.weights import LoadedWeights, WeightsMode, load_weights
from kvferry.engine.workspace import Workspace

__all__ = ["Chunk", "Engine", "EngineOptions", "Sight"]

_F32 = NDArray[np.float32]

_TOKENIZER_KEY: Final = "tokenizer.ggml.model"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``n_threads`` of a step; ``kv_bytes`` of KV memory; ``max_batch_rows`` that one pass takes (more are cut into
    several); ``context_length`` in tokens, at most (and by default) the model's own; ``quant``: what weights become
    that the kernels cannot take as they are stored; ``kv``: what the cache stores; ``weights``: where they lie
    (weights.py); ``cores``: the processors that the engine's threads keep to, None for any."""

    n_threads: int
    kv_bytes: int
    max_batch_rows: int = 512
    context_length: int | None = None
    quant: Quant = "q8"
    kv: KvKind = KvKind.F32
    weights: WeightsMode = "auto"
    cores: frozenset[int] | None = None


class Engine:
    """Not thread-safe: one thread at a time may call ``forward``. Sequences may be read and released from others."""

    def __init__(
        self, packed: PackedModel, options: EngineOptions, model_fingerprint: str, file: ModelFile | None = None
    ) -> None:
        config = packed.config
        self.config: Final = config
        self.fingerprint: Final = model_fingerprint
        self.kernel_path: Final = ISA.name
        self.weights = "memory"  # where they lie and why, for a person
        self.n_threads: Final = options.n_threads
        self.context_length: Final = _context_length(config, options)
        self.geometry: Final = KvGeometry(config.n_layers, config.n_kv_heads, config.head_dim, kind=options.kv)
        self.pool: Final = KvPool(self.geometry, options.kv_bytes)
        self.max_batch_rows: Final = options.max_batch_rows
        self._packed = packed
        self._file = file
        self._cores: Final = options.cores
        self._workers = WorkerThreads(options.n_threads)
        self._slots = StepSlots(self._workers.n_slots, options.max_batch_rows, config, packed.rope)
        self._workspace = Workspace(config, options.max_batch_rows, options.n_threads, self.pool, options.kv)
        self._workspace.record["control_at"] = self._workers.control_at
        self._workspace.record["phases_at"] = self._slots.phases.ctypes.data
        self._workspace.record["phases_stride"] = self._slots.phases.strides[0]
        bound = with_kernels(packed.model), with_kernels(packed.layers)
        self._records = (*bound, self._workspace.record, self._slots.records)
        try:
            self._workers.start(lambda thread: run_steps(*self._records, thread, options.n_threads, 0), options.cores)
        except OutOfResources:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        path: Path,
        options: EngineOptions,
        *,
        progress: Progress = no_progress,
        tokenizer_digest: str | None = None,
    ) -> Engine:
        """Open a GGUF file or a checkpoint folder, get its packed weights and the kernels ready.

        ``progress``: of packing, where there is no packed file yet. ``tokenizer_digest``: ``TextModel.digest`` of the
        same path, where it is loaded already.
        Raises ModelNotFound, ModelInvalid or UnsupportedArchitecture for the model, OutOfKvMemory when ``kv_bytes`` is
        less than one block.
        """
        file = open_model(path)
        digest = _tokenizer_digest(path) if tokenizer_digest is None else tokenizer_digest
        weights = load_weights(
            file,
            quant=options.quant,
            context_length=_context_length(file.config, options),
            want=options.weights,
            kv_bytes=options.kv_bytes,
            progress=progress,
        )
        engine = cls(weights.packed, options, _fingerprint(file, weights, options.kv, digest), file)
        engine.weights = weights.how
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
        missing = sum([c.sequence.n_missing_blocks(c.sequence.n_rows + len(c.token_ids)) for c in chunks])
        if missing:
            if missing > self.pool.n_free_blocks:
                raise OutOfKvMemory(
                    f"the batch needs {missing} KV blocks and {self.pool.n_free_blocks} of {self.pool.n_blocks} are "
                    "free; release a sequence or give the engine more KV memory"
                )
            for chunk in chunks:
                chunk.sequence.reserve(chunk.sequence.n_rows + len(chunk.token_ids))
        n_rows = sum([len(chunk.token_ids) for chunk in chunks])
        counts = [chunk.n_logit_rows for chunk in chunks]
        logits = np.empty((sum(counts), -(-self.config.vocab_size // UNIT_ROWS) * UNIT_ROWS), np.float32)
        n_done = 0
        for start in range(0, n_rows, self.max_batch_rows):
            logits_at = logits.ctypes.data + n_done * logits.strides[0]
            n_done += self._run(chunks, start, min(start + self.max_batch_rows, n_rows), logits_at)
        for chunk in chunks:
            chunk.sequence.commit(chunk.sequence.n_rows + len(chunk.token_ids))
        ends = accumulate(counts)
        return [logits[end - n : end, : self.config.vocab_size] for end, n in zip(ends, counts, strict=True)]

    def pin_this_thread(self) -> None:
        """Keep the calling thread, which is to call ``forward``, to the engine's processors."""
        pin_this_thread(self._cores)

    def close(self) -> None:
        """End the worker threads. The engine computes nothing afterwards."""
        slot = self._workers.free_slot()
        self._slots.fill_with_nothing(slot)
        self._workers.announce(slot)
        self._workers.join()

    def _run(self, chunks: Sequence[Chunk], start: int, stop: int, logits_at: int) -> int:
        """One step; returns how many rows of logits it made."""
        slot = self._workers.free_slot()
        n_logit_rows = self._slots.fill(slot, chunks, start, stop, logits_at)
        run_steps(*self._records, 0, self.n_threads, self._workers.announce(slot))
        return n_logit_rows

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
            least, most = (tokens[0], tokens[0]) if len(tokens) == 1 else (tokens.min(), tokens.max())
            if least < 0 or most >= self.config.vocab_size:
                raise InvalidTokens(f"token ids lie in 0 .. {self.config.vocab_size - 1}; got {least} .. {most}")
            n_rows = chunk.sequence.n_rows + len(tokens)
            if n_rows > self.context_length:
                raise ContextExceeded(f"{n_rows} tokens are more than the context of {self.context_length} holds")


def _context_length(config: ModelConfig, options: EngineOptions) -> int:
    if options.context_length is None:
        return config.context_length
    return min(options.context_length, config.context_length)


def _fingerprint(file: ModelFile, weights: LoadedWeights, kv: KvKind, tokenizer_digest: str) -> str:
    return fingerprint(
        weights_sha256=weights.source_sha256,
        config=file.config,
        quant_recipe=weights.packed.recipe,
        tokenizer_digest=tokenizer_digest,
        kv_kind=kv.value,
        numerics_version=NUMERICS_VERSION,
    )


def _tokenizer_digest(path: Path) -> str:
    """The digest of the model's text part; what holds none is a model of bare token ids."""
    has_text = (path / "tokenizer.json").exists() if path.is_dir() else _TOKENIZER_KEY in open_gguf(path).metadata
    if not has_text:
        return "no tokenizer"
    return TextModel.load(path).digest
