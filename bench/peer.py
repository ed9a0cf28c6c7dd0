"""llama.cpp as a runner of the engine bench, through llama-cpp-python's low-level interface."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvferry.bench.workload import CONTEXT, MAX_BATCH, PASS_ROWS
from kvferry.engine.files.catalogue import cache_root

INSTALL_HINT: Final = "llama.cpp is not here to compare with; install the peer: pip install 'kvferry[bench]'"
_FTYPES: Final = {"q4_0": 2, "q8_0": 7}  # LLAMA_FTYPE_MOSTLY_...
_Q8_0: Final = 8  # GGML_TYPE_Q8_0
_kept_alive: Final[list[Any]] = []  # callbacks that C code holds


class PeerMissing(Exception):
    """llama-cpp-python is not installed, or cannot do what is asked."""


def library() -> Any:
    """The module llama_cpp, with its log switched off."""
    try:
        module: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise PeerMissing(INSTALL_HINT) from error
    silence = module.llama_log_callback(lambda *_: None)
    module.llama_log_set(silence, None)
    _kept_alive.append(silence)
    return module


def requantised(path: Path, kind: str) -> Path:
    """The model in another quantisation, made once by llama.cpp's own code, in the cache. The head stays q8_0."""
    llama = library()
    target = cache_root() / "bench" / f"{path.stem}.{kind}.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(f".{os.getpid()}.tmp")
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = _FTYPES[kind]
    parameters.allow_requantize = True
    parameters.output_tensor_type = parameters.token_embedding_type = _Q8_0
    parameters.nthread = 1
    if llama.llama_model_quantize(str(path).encode(), str(staged).encode(), parameters) != 0:
        raise PeerMissing(f"llama.cpp cannot make a {kind} file of {path.name}")
    staged.replace(target)
    return target


class LlamaCpp:
    """One model file with one setting of flash attention. Not thread-safe."""

    def __init__(self, path: Path, n_threads: int, *, flash: bool, label: str) -> None:
        self._llama = library()
        self._llama.llama_backend_init()
        self.name = f"llama.cpp {label}, flash attention {'on' if flash else 'off'}"
        self._model = self._llama.llama_model_load_from_file(
            str(path).encode(), self._llama.llama_model_default_params()
        )
        self._batch = self._llama.llama_batch_init(PASS_ROWS, 0, 1)
        self._contexts: dict[int, Any] = {}
        self._settings = (n_threads, 1 if flash else 0)
        self._depth = -1

    def prefill(self, tokens: Sequence[int]) -> None:
        """All tokens from an empty cache, logits of the last."""
        context = self._context(1)
        self._llama.llama_memory_clear(self._llama.llama_get_memory(context), False)
        self._depth = -1
        for start in range(0, len(tokens), PASS_ROWS):
            part = tokens[start : start + PASS_ROWS]
            places = [(token, start + i, 0) for i, token in enumerate(part)]
            self._decode(context, places, is_last=start + PASS_ROWS >= len(tokens))

    def prepare_decode(self, tokens: Sequence[int]) -> None:
        """Rows of these tokens, which ``decode`` goes on from, each time anew."""
        memory = self._llama.llama_get_memory(self._context(1))
        if self._depth != len(tokens):
            self._llama.llama_memory_clear(memory, False)
            if tokens:
                self.prefill(tokens)
            self._depth = len(tokens)
        self._llama.llama_memory_seq_rm(memory, 0, self._depth, -1)

    def decode(self, tokens: Sequence[int]) -> None:
        """One token after the other."""
        for i, token in enumerate(tokens):
            self._decode(self._context(1), [(token, self._depth + i, 0)], is_last=True)

    def prepare_batch(self, n_sequences: int) -> None:
        """Empty sequences to decode side by side."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context(n_sequences)), False)

    def decode_batch(self, tokens: Sequence[int], n_sequences: int) -> None:
        """Each token for every sequence, in one step."""
        for position, token in enumerate(tokens):
            places = [(token + 3 * sequence, position, sequence) for sequence in range(n_sequences)]
            self._decode(self._context(n_sequences), places, is_last=False, all_logits=True)

    def close(self) -> None:
        """Free everything."""
        for context in self._contexts.values():
            self._llama.llama_free(context)
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_model_free(self._model)

    def _context(self, n_sequences: int) -> Any:
        if n_sequences not in self._contexts:
            n_threads, flash = self._settings
            parameters = self._llama.llama_context_default_params()
            parameters.n_ctx = CONTEXT if n_sequences == 1 else 256 * MAX_BATCH
            parameters.n_batch = parameters.n_ubatch = PASS_ROWS
            parameters.n_seq_max = n_sequences
            parameters.n_threads = parameters.n_threads_batch = n_threads
            parameters.flash_attn_type = flash
            self._contexts[n_sequences] = self._llama.llama_init_from_model(self._model, parameters)
        return self._contexts[n_sequences]

    def _decode(
        self, context: Any, places: list[tuple[int, int, int]], *, is_last: bool, all_logits: bool = False
    ) -> None:
        """One pass over (token, position, sequence)."""
        batch = self._batch
        batch.n_tokens = len(places)
        for i, (token, position, sequence) in enumerate(places):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = all_logits or (is_last and i == len(places) - 1)
        if self._llama.llama_decode(context, batch) != 0:
            raise RuntimeError(f"{self.name} could not decode {len(places)} tokens")
