"""Choosing the next token: a pure function of (logits, tokens so far, settings, position, what is allowed).

The definition, to the last bit:

0. *Mask.* Where the answer has to be of some form, every token that its form does not allow has the logit -inf from
here on: it is no candidate.
1. *Penalty.* Each token that occurs in the last ``repetition_window`` tokens has its logit divided by
   ``repetition_penalty`` if it is above 0, else multiplied by it; once, however often it occurs (float64 arithmetic,
   rounded to float32).
2. *Greedy.* With temperature 0 the token with the largest logit is chosen, and the other settings have no say.
3. *Temperature.* A token's weight is floor(2^40 e^((logit - largest) / temperature)), an integer. Tokens of weight 0
are out.
4. *min_p* keeps weights of at least floor(min_p 2^40), that is, tokens at least min_p times as likely as the best.
*top_k* then keeps the k largest logits (both keep the head of one ranking, so their order is of no consequence).
*top_p* then keeps the largest logits, as few as reach floor(top_p x the weight kept so far). Of equal logits the lowest
ids stay.
5. *Draw.* u, a multiple of 2^-53 in [0, 1), comes from Philox4x32-10 with key = seed and counter = position, the
token's absolute index in the sequence. The chosen token is the first, by id, at which the running sum of the kept
weights exceeds floor(u x their total).

A NaN counts as -inf. Log-probabilities are those of the *raw* logits: before mask, penalty, temperature and filters.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import EngineError
from kvferry.engine.kernels.compile_cache import compile_cache
from kvferry.engine.kernels.sampling import argmax, draw, keep_allowed, log_total, penalise, top_ids
from kvferry.engine.sampling_settings import SamplingSettings

__all__ = ["SampledToken", "SamplingSettings", "sample", "warm_up"]


class _Scratch(threading.local):
    """One buffer per thread: a fresh megabyte per token would cost more in page faults than the arithmetic in it."""

    def __init__(self) -> None:
        self._weights = np.empty(0, np.int64)

    def weights(self, n: int) -> NDArray[np.int64]:
        if len(self._weights) < n:
            self._weights = np.empty(n, np.int64)
        return self._weights[:n]


_scratch = _Scratch()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The chosen token; with log-probabilities its own, and the most likely ones as (token id, logprob), best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(
    logits: NDArray[np.float32],
    tokens_so_far: Sequence[int] | NDArray[np.int32],
    settings: SamplingSettings,
    position: int,
    mask: NDArray[np.uint32] | None = None,
) -> SampledToken:
    """Choose the token at index ``position`` of a sequence.

    ``logits``: float32 [vocab], contiguous, not changed. ``tokens_so_far``: the sequence before ``position``; only its
    last ``repetition_window`` tokens are looked at. ``settings`` must be valid. ``mask``: one bit for each token that
    may be chosen, uint32 [words], lowest bit first; None: all may. May be called from any thread, and releases the
    interpreter lock.

    Raises EngineError when no logit of an allowed token is finite, which only a damaged model can cause.
    """
    candidates = logits if mask is None else keep_allowed(logits, mask)
    seen = _penalised(candidates, tokens_so_far, settings)
    if settings.temperature == 0:
        token_id = int(argmax(seen))
    else:
        token_id = int(
            draw(
                seen,
                _as_float32(settings.temperature),
                settings.top_k,
                _as_float32(settings.top_p),
                _as_float32(settings.min_p),
                np.uint64(settings.seed),
                np.uint64(position),
                _scratch.weights(len(logits)),
            )
        )
    if token_id < 0:
        raise EngineError(
            f"the model computed no finite logit for token {position}; verify its file: kvferry models verify"
        )
    if not settings.logprobs:
        return SampledToken(token_id)
    return _with_logprobs(token_id, logits, settings.top_logprobs)


def warm_up(vocab_size: int) -> None:
    """Compile everything that ``sample`` can need, and keep it on disk: it takes seconds the first time."""
    logits = np.linspace(-1.0, 1.0, vocab_size, dtype=np.float32)
    recent = np.zeros(1, np.int32)
    every_filter = SamplingSettings(
        temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, repetition_penalty=1.1, logprobs=True, top_logprobs=1
    )
    sample(logits, recent, SamplingSettings(), 0)
    sample(logits, recent, every_filter, 0, np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32))
    compile_cache().publish()


def _penalised(
    logits: NDArray[np.float32], tokens_so_far: Sequence[int] | NDArray[np.int32], settings: SamplingSettings
) -> NDArray[np.float32]:
    penalty = _as_float32(settings.repetition_penalty)
    window = min(settings.repetition_window, len(tokens_so_far))
    if penalty == 1.0 or window == 0:
        return logits
    recent = np.asarray(tokens_so_far[len(tokens_so_far) - window :], dtype=np.int32)
    penalised: NDArray[np.float32] = penalise(logits, recent, penalty)
    return penalised


def _with_logprobs(token_id: int, logits: NDArray[np.float32], n_top: int) -> SampledToken:
    largest = float(logits[top_ids(logits, 1)[0]])
    log_sum = float(log_total(logits, largest, _scratch.weights(len(logits))))

    def logprob(index: int) -> float:
        return float(logits[index]) - largest - log_sum

    top = tuple((int(index), logprob(index)) for index in top_ids(logits, n_top)) if n_top else ()
    return SampledToken(token_id, logprob(token_id), top)


def _as_float32(value: float) -> float:
    """The nearest float32, as a float: a setting means the same whether it came over the wire or not."""
    return float(np.float32(value))
