"""A small model that proposes what a large one will say (speculation.py).

It draws with the job's own settings at the job's own positions: the same random number picks from both models'
distributions, so a draft that thinks alike proposes the same token at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.engine import Chunk, Engine
from kvferry.engine.errors import EngineError, OutOfKvMemory
from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.sampling import sample
from kvferry.engine.speculation import Ask
from kvferry.engine.vision.placed import common_prefix

CATCH_UP_ROWS: Final = 32
"""Rows of a job that the draft computes in a step before it proposes anything: a long prompt must not hold it up."""


class DraftMismatch(EngineError):
    """The draft model has another vocabulary."""

    code = "draft_mismatch"


@dataclass(slots=True)
class _Drafted:
    """What the draft has of a job: rows for ``tokens``."""

    sequence: KvSequence
    tokens: NDArray[np.int32]


class DraftModel:
    """Proposes by running a second engine. Not thread-safe. Raises DraftMismatch when token ids differ in meaning:
    ``vocab_size`` is that of the model it drafts for."""

    is_free: Final = False

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        if engine.config.vocab_size != vocab_size:
            raise DraftMismatch(
                f"the draft model has {engine.config.vocab_size} tokens and the model has {vocab_size}; "
                "a draft must come from the same family"
            )
        self._engine = engine
        self._jobs: dict[int, _Drafted] = {}

    def propose(self, asks: Sequence[Ask]) -> list[NDArray[np.int32]]:
        proposed: list[list[int]] = [[] for _ in asks]
        ready = [i for i, ask in enumerate(asks) if ask.n_most > 0 and self._catch_up(ask)]
        while ready:
            chunks = [self._next_chunk(asks[i], proposed[i]) for i in ready]
            for i, logits in zip(ready, self._engine.forward(chunks), strict=True):
                so_far = _joined(asks[i].tokens, proposed[i])
                self._jobs[asks[i].serial].tokens = so_far
                proposed[i].append(sample(logits[-1], so_far, asks[i].sampling, len(so_far)).token_id)
            ready = [i for i in ready if len(proposed[i]) < asks[i].n_most]
        return [np.array(tokens, np.int32) for tokens in proposed]

    def forget(self, serial: int) -> None:
        drafted = self._jobs.pop(serial, None)
        if drafted is not None:
            drafted.sequence.release()

    def _catch_up(self, ask: Ask) -> bool:
        """Compute rows of what was said since; True when all but a few are there, and memory for the proposals."""
        if ask.serial not in self._jobs:
            self._jobs[ask.serial] = _Drafted(self._engine.new_sequence(), ask.tokens[:0])
        drafted = self._jobs[ask.serial]
        sequence = drafted.sequence
        n_same = min(common_prefix(drafted.tokens, ask.tokens), len(ask.tokens) - 1)
        sequence.truncate(min(sequence.n_rows, n_same))
        start = sequence.n_rows
        n_missing = len(ask.tokens) - start
        n_rows = min(n_missing, CATCH_UP_ROWS)
        n_most = len(ask.tokens) + ask.n_most
        try:
            sequence.reserve(n_most if n_missing <= n_rows else start + n_rows)
        except OutOfKvMemory:
            self.forget(ask.serial)
            return False
        if n_most > self._engine.context_length:
            return False
        if n_missing > n_rows:
            self._engine.forward([Chunk(sequence, ask.tokens[start : start + n_rows], "none")])
        drafted.tokens = ask.tokens[: sequence.n_rows].copy()
        return n_missing <= n_rows

    def _next_chunk(self, ask: Ask, proposed: list[int]) -> Chunk:
        sequence = self._jobs[ask.serial].sequence
        return Chunk(sequence, _joined(ask.tokens, proposed)[sequence.n_rows :])


def _joined(tokens: NDArray[np.int32], more: list[int]) -> NDArray[np.int32]:
    return np.concatenate([tokens, np.array(more, np.int32)])
