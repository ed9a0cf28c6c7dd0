"""The jitted core of sampling. What it computes is defined in engine/sampling.py; this file makes it fast.

Nothing is sorted. A threshold is found by radix selection over the logits' bit patterns: histograms of 12, 10 and 10
bits, each within the bin that the one before chose. Weights are integers, so their sums are exact and no order of
addition matters.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.sampling_math import exp_nonpositive, log_positive, uniform

# The most likely token weighs 2^40. A vocabulary of 2^22 then sums to at most 2^62, and a token is lost to rounding
# only when it is 10^12 times less likely than the best.
WEIGHT_ONE: Final = 1 << 40

_CHUNK: Final = 1024  # tokens whose weights are computed at a time, so that the intermediate stays in the first cache

_LOWEST: Final = np.int32(-(2**31))
_MINUS_INFINITY_KEY: Final = np.int32(-2139095041)  # order_key of -inf
_INFINITY_KEY: Final = np.int32(2139095040)  # order_key of +inf


@njit(inline="always")
def _order_key(logit: Any) -> Any:
    """An int32 that orders as the float32 does: equal for -0 and +0; a NaN counts as -inf."""
    bits = np.float32(logit + np.float32(0.0)).view(np.int32)
    key = bits if bits >= 0 else np.int32(bits ^ np.int32(0x7FFFFFFF))
    is_nan = (bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000)
    return _MINUS_INFINITY_KEY if is_nan else key


@njit(inline="always")
def _unsigned_key(logit: Any) -> Any:
    return np.uint32(_order_key(logit)) ^ np.uint32(0x80000000)


@kernel
def argmax(logits: Any) -> Any:
    """The lowest id among the largest logits; -1 when the largest is not finite."""
    best = _LOWEST
    for i in range(logits.size):
        best = max(best, _order_key(logits[i]))
    if best <= _MINUS_INFINITY_KEY or best >= _INFINITY_KEY:
        return -1
    for i in range(logits.size):
        if _order_key(logits[i]) == best:
            return i
    return -1


@kernel
def keep_allowed(logits: Any, mask: Any) -> Any:
    """A copy of the logits in which tokens whose bit in `mask` (uint32 [words], lowest bit first) is 0 are -inf.

    So are those beyond the mask.
    """
    out = np.full(logits.size, np.float32(-np.inf))
    for word in range(min(mask.size, (logits.size + 31) // 32)):
        bits = mask[word]
        if bits != 0:
            for i in range(word * 32, min(word * 32 + 32, logits.size)):
                if (bits >> np.uint32(i & 31)) & np.uint32(1):
                    out[i] = logits[i]
    return out


@kernel
def penalise(logits: Any, recent: Any, penalty: Any) -> Any:
    """A copy of the logits in which each token that occurs in `recent` was made less likely, once."""
    out = logits.copy()
    for i in range(recent.size):
        token = recent[i]
        if 0 <= token < logits.size:
            logit = np.float64(logits[token])  # of the original: a token that occurs twice is penalised once
            out[token] = np.float32(logit / penalty) if logit > 0.0 else np.float32(logit * penalty)
    return out


@kernel
def _fill_weights(logits: Any, best: Any, temperature: Any, weights: Any) -> Any:
    """weights[i] = floor(2^40 e^((logit_i - best) / temperature)), 0 for a NaN; returns their sum."""
    scaled = np.empty(_CHUNK, np.float64)
    total = np.int64(0)
    for start in range(0, logits.size, _CHUNK):
        chunk = logits[start : start + _CHUNK]
        out = weights[start : start + _CHUNK]
        for i in range(chunk.size):
            x = (np.float64(chunk[i]) - best) / temperature
            scaled[i] = exp_nonpositive(x if x <= 0.0 else -np.inf) * np.float64(WEIGHT_ONE)
        for i in range(chunk.size):
            weight = np.int64(scaled[i])
            out[i] = weight
            total += weight
    return total


@kernel
def _gather(logits: Any, least: Any, ids: Any, keys: Any, weights: Any) -> Any:
    """Put the tokens that weigh at least `least` in play; returns how many there are."""
    n = 0
    for i in range(logits.size):
        weight = weights[i]
        ids[n] = i
        keys[n] = _unsigned_key(logits[i])
        weights[n] = weight
        n += 1 if weight >= least else 0
    return n


@kernel
def _select(keys: Any, weights: Any, target: Any) -> Any:
    """Where the highest keys reach a total of `target`: (key, total above).

    `key` is the highest one such that the tokens whose key is at least as high weigh `target` or more together; `total
    above` is what those with a higher key weigh. 1 <= target <= the total of all.
    """
    above = np.int64(0)
    prefix = np.uint32(0)
    for level in range(3):
        shift = np.uint32(20 - 10 * level)
        n_bins = 4096 if level == 0 else 1024
        totals = np.zeros(n_bins, np.int64)
        if level == 0:
            for i in range(keys.size):
                totals[keys[i] >> shift] += weights[i]
        else:
            for i in range(keys.size):
                if keys[i] >> (shift + np.uint32(10)) == prefix:
                    totals[(keys[i] >> shift) & np.uint32(n_bins - 1)] += weights[i]
        chosen = n_bins - 1
        while chosen > 0 and above + totals[chosen] < target:
            above += totals[chosen]
            chosen -= 1
        prefix = (prefix << np.uint32(0 if level == 0 else 10)) | np.uint32(chosen)
    return prefix, above


@kernel
def _keep_top(ids: Any, keys: Any, weights: Any, measure: Any, target: Any) -> Any:
    """Keep in play the most likely tokens, as few as reach `target` by `measure` (int64 [n]: ones, or the weights).

    Of tokens with equal logits the lowest ids are kept. Returns how many there are.
    """
    threshold, reached = _select(keys, measure, target)
    n = 0
    for i in range(keys.size):
        if keys[i] > threshold or (keys[i] == threshold and reached < target):
            if keys[i] == threshold:
                reached += measure[i]
            ids[n] = ids[i]
            keys[n] = keys[i]
            weights[n] = weights[i]
            n += 1
    return n


@kernel
def draw(
    logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, position: Any, weights: Any
) -> Any:
    """A token drawn from the filtered distribution; -1 when the largest logit is not finite.

    `weights` is scratch, int64 [vocab].
    """
    best = argmax(logits)
    if best < 0:
        return -1
    total = _fill_weights(logits, np.float64(logits[best]), temperature, weights)
    is_filtered = min_p > 0.0 or 0 < top_k < logits.size or top_p < 1.0
    ids = np.empty(logits.size if is_filtered else 0, np.int32)
    n = logits.size
    if is_filtered:
        n, total = _filter(logits, top_k, top_p, min_p, ids, weights)
    target = min(np.int64(uniform(seed, position) * np.float64(total)), total - 1)
    for i in range(n):
        target -= weights[i]
        if target < 0:
            return ids[i] if is_filtered else i
    return best


@kernel
def _filter(logits: Any, top_k: Any, top_p: Any, min_p: Any, ids: Any, weights: Any) -> Any:
    """min_p, top_k and top_p in turn; returns the number of tokens left in play and what they weigh."""
    keys = np.empty(logits.size, np.uint32)
    n = _gather(logits, max(np.int64(min_p * np.float64(WEIGHT_ONE)), 1), ids, keys, weights)
    if 0 < top_k < n:
        n = _keep_top(ids[:n], keys[:n], weights[:n], np.ones(n, np.int64), np.int64(top_k))
    if top_p < 1.0:
        target = max(np.int64(top_p * np.float64(_total(weights[:n]))), 1)
        n = _keep_top(ids[:n], keys[:n], weights[:n], weights[:n], target)
    return n, _total(weights[:n])


@kernel
def _total(weights: Any) -> Any:
    total = np.int64(0)
    for i in range(weights.size):
        total += weights[i]
    return total


@kernel
def log_total(logits: Any, best: Any, weights: Any) -> Any:
    """ln sum e^(logit - best) over all logits; at least 0. `weights` is scratch, int64 [vocab]."""
    total = _fill_weights(logits, np.float64(best), 1.0, weights)
    return log_positive(np.float64(total) / np.float64(WEIGHT_ONE))


@kernel
def top_ids(logits: Any, n: Any) -> Any:
    """The ids of the n largest logits, largest first, of equal ones the lowest id first; int32 [min(n, size)]."""
    n = min(n, logits.size)
    keys = np.empty(logits.size, np.uint32)
    for i in range(logits.size):
        keys[i] = _unsigned_key(logits[i])
    threshold, above = _select(keys, np.ones(logits.size, np.int64), np.int64(n))
    found = np.empty(n, np.int32)
    n_found = 0
    for i in range(keys.size):
        if keys[i] > threshold or (keys[i] == threshold and above < n):
            above += 1 if keys[i] == threshold else 0
            j = n_found
            while j > 0 and keys[found[j - 1]] < keys[i]:
                found[j] = found[j - 1]
                j -= 1
            found[j] = i
            n_found += 1
    return found
