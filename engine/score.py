"""Score a text: logits and K/V rows of every token, to hold the engine against another implementation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.errors import ContextExceeded, InvalidTokens
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kv_cache import KvGeometry, KvKind, KvSequence
from kvferry.engine.packing import Quant
from kvferry.engine.reference import ReferenceModel

_F32 = NDArray[np.float32]

DEFAULT_CHUNK: Final = 512
# A node keeps room for many sequences; a score needs one, and one block for the engine's own first token.
_SPARE_BLOCKS: Final = 1


@dataclass(frozen=True)
class Score:
    """``logits`` float32 [n, vocab]; ``k`` and ``v`` float32 [n_layers, n, kv_dim], as attention uses them;
    ``greedy_ids`` int32: the tokens that follow when the largest logit is taken each time, ends not heeded."""

    logits: _F32
    k: _F32
    v: _F32
    greedy_ids: NDArray[np.int32]


def score(
    path: Path,
    token_ids: NDArray[np.int32],
    *,
    chunk: int,
    n_threads: int,
    n_greedy: int,
    quant: Quant,
    kv: KvKind = KvKind.F32,
) -> Score:
    """Run the engine over the text, ``chunk`` tokens at a time. Raises as Engine does."""
    engine = Engine.load(path, _options(path, len(token_ids) + n_greedy, n_threads, quant, kv))
    try:
        sequence = engine.new_sequence()
        logits = np.concatenate(
            [
                engine.forward([Chunk(sequence, token_ids[start : start + chunk], "all")])[0]
                for start in range(0, len(token_ids), chunk)
            ]
        )
        k, v = _rows(engine.geometry, sequence)
        return Score(logits, k, v, _greedy(engine, sequence, logits[-1], n_greedy))
    finally:
        engine.close()


def score_reference(path: Path, token_ids: NDArray[np.int32], *, n_greedy: int) -> Score:
    """The same by the slow float path."""
    model = ReferenceModel.load(path)
    _check(token_ids, model.config.vocab_size)
    if len(token_ids) + n_greedy > model.config.context_length:
        raise ContextExceeded(
            f"{len(token_ids) + n_greedy} tokens are more than the context of {model.config.context_length} holds"
        )
    output = model.forward(token_ids, n_greedy=n_greedy)
    return Score(output.logits, output.k, output.v, output.greedy_ids)


def _options(path: Path, n_tokens: int, n_threads: int, quant: Quant, kv: KvKind) -> EngineOptions:
    config = open_model(path).config
    geometry = KvGeometry(config.n_layers, config.n_kv_heads, config.head_dim, kind=kv)
    n_blocks = -(-n_tokens // geometry.block_size) + _SPARE_BLOCKS
    return EngineOptions(n_threads=n_threads, kv_bytes=n_blocks * geometry.block_bytes, quant=quant, kv=kv)


def _check(token_ids: NDArray[np.int32], vocab_size: int) -> None:
    if len(token_ids) == 0 or token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidTokens(f"a text is at least one token, each in 0 .. {vocab_size - 1}")


def _rows(geometry: KvGeometry, sequence: KvSequence) -> tuple[_F32, _F32]:
    k = np.empty((geometry.n_layers, sequence.n_rows, geometry.kv_dim), np.float32)
    v = np.empty_like(k)
    for layer in range(geometry.n_layers):
        sequence.read_rows(layer, 0, sequence.n_rows, k[layer], v[layer])
    return k, v


def _greedy(engine: Engine, sequence: KvSequence, logits: _F32, n_tokens: int) -> NDArray[np.int32]:
    ids: list[int] = []
    for i in range(n_tokens):
        ids.append(int(np.argmax(logits)))  # the lowest id among equals
        if i + 1 < n_tokens:
            logits = engine.forward([Chunk(sequence, np.array(ids[-1:], np.int32))])[0][0]
    return np.array(ids, np.int32)
