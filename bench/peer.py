"""llama.cpp as a runner of the engine bench, through llama-cpp-python's low-level interface."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvferry.bench.workload import CONTEXT, MAX_BATCH, PASS_ROWS, Speed, Task, timed, tokens_of
from kvferry.engine.files.catalogue import cache_root

INSTALL_HINT: Final = (
    "llama.cpp is not here to compare with; install the peer: pip install 'kvferry[bench]' (it compiles llama.cpp for "
    "this processor, which takes some minutes, a C++ compiler and CMake), or put llama.cpp's llama-bench on the PATH"
)
_FTYPES: Final = {"q4_0": 2, "q8_0": 7}  # LLAMA_FTYPE_MOSTLY_...
_Q8_0: Final = 8  # GGML_TYPE_Q8_0
_BATCH_ROWS: Final = 256  # of one sequence in a batch
_kept_alive: Final[list[Any]] = []  # callbacks that C code holds


class PeerMissing(Exception):
    """The peer is not installed, or cannot do what is asked."""


def library() -> Any:
    """The module llama_cpp, with its log switched off."""
    try:
        module: Any = importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:  # not there, or its library does not load
        raise PeerMissing(INSTALL_HINT) from error
    silence = module.llama_log_callback(lambda *_: None)
    module.llama_log_set(silence, None)
    _kept_alive.append(silence)
    return module


def requantised(path: Path, kind: str) -> Path:
    """The model in another quantisation, made once by llama.cpp's own code, in the cache. The head stays q8_0."""
    llama = library()
    target = cache_root() / "bench" / f"{path.stem}.{kind}.gguf"
    if target.is_file() and target.stat().st_mtime >= path.stat().st_mtime:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(f".{os.getpid()}.tmp")
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = _FTYPES[kind]
    parameters.allow_requantize = True
    parameters.output_tensor_type = parameters.token_embedding_type = _Q8_0
    parameters.nthread = 0  # all
    try:
        if llama.llama_model_quantize(str(path).encode(), str(staged).encode(), parameters) != 0:
            raise PeerMissing(f"llama.cpp cannot make a {kind} file of {path.name}")
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
    return target


class LlamaModel:
    """One model file in llama.cpp's memory; its runners share it."""

    def __init__(self, path: Path, label: str) -> None:
        self.label = label
        self.llama = library()
        self.llama.llama_backend_init()
        self.handle = self.llama.llama_model_load_from_file(str(path).encode(), self.llama.llama_model_default_params())
        if not self.handle:
            raise PeerMissing(f"llama.cpp cannot load {path}")

    def close(self) -> None:
        self.llama.llama_model_free(self.handle)


class LlamaCpp:
    """One model with one setting of flash attention and so many threads. Not thread-safe."""

    def __init__(self, model: LlamaModel, n_threads: int, *, flash: bool) -> None:
        self.name = f"llama.cpp {model.label}, flash attention {'on' if flash else 'off'}"
        self._llama = model.llama
        self._model = model
        self._batch = self._llama.llama_batch_init(PASS_ROWS, 0, 1)
        self._contexts: dict[int, Any] = {}
        self._settings = (n_threads, 1 if flash else 0)
        self._depth = -1  # rows of the single sequence's prefix; -1: something else is there

    def can(self, task: Task) -> bool:  # noqa: ARG002 - all
        return True

    def run(self, task: Task) -> Speed:
        context, tokens = self._context(task.n_sequences), tokens_of(task.n_tokens)
        if task.kind == "decode":
            self._go_to(task.depth)
            return timed(task.n_counted, lambda: self._decode_batch(context, tokens, 1, task.depth))
        self._clear(context)
        if task.kind == "prefill":
            return timed(task.n_counted, lambda: self._prefill(context, tokens))
        return timed(task.n_counted, lambda: self._decode_batch(context, tokens, task.n_sequences, 0))

    def close(self) -> None:
        for context in self._contexts.values():
            self._llama.llama_free(context)
        self._llama.llama_batch_free(self._batch)

    def _clear(self, context: Any) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(context), False)
        self._depth = -1

    def _go_to(self, depth: int) -> None:
        """Rows of so many tokens and no more in the single sequence."""
        context = self._context(1)
        if self._depth != depth:
            self._clear(context)
            self._prefill(context, tokens_of(depth))
            self._depth = depth
        self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(context), 0, depth, -1)

    def _prefill(self, context: Any, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), PASS_ROWS):
            part = tokens[start : start + PASS_ROWS]
            is_last = start + PASS_ROWS >= len(tokens)
            self._decode(
                context, [(token, start + i, 0, is_last and i == len(part) - 1) for i, token in enumerate(part)]
            )

    def _decode_batch(self, context: Any, tokens: Sequence[int], n_sequences: int, depth: int) -> None:
        """Each token for every sequence in one llama_batch, one after the other, logits of all."""
        for i, token in enumerate(tokens):
            self._decode(
                context, [(token + 3 * sequence, depth + i, sequence, True) for sequence in range(n_sequences)]
            )

    def _context(self, n_sequences: int) -> Any:
        if n_sequences not in self._contexts:
            n_threads, flash = self._settings
            parameters = self._llama.llama_context_default_params()
            parameters.n_ctx = CONTEXT if n_sequences == 1 else _BATCH_ROWS * MAX_BATCH
            parameters.n_batch = parameters.n_ubatch = PASS_ROWS
            parameters.n_seq_max = n_sequences
            parameters.n_threads = parameters.n_threads_batch = n_threads
            parameters.flash_attn_type = flash
            context = self._llama.llama_init_from_model(self._model.handle, parameters)
            if not context:
                raise PeerMissing(f"{self.name} gives no context of {parameters.n_ctx} tokens")
            self._contexts[n_sequences] = context
        return self._contexts[n_sequences]

    def _decode(self, context: Any, places: Sequence[tuple[int, int, int, bool]]) -> None:
        """One pass over (token, position, sequence, whether it gets logits)."""
        batch = self._batch
        batch.n_tokens = len(places)
        for i, (token, position, sequence, has_logits) in enumerate(places):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = has_logits
        if self._llama.llama_decode(context, batch) != 0:
            raise RuntimeError(f"{self.name} could not decode {len(places)} tokens")
