"""The engine's numbers against the recorded oracle, within the tolerance guide."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.reference import ReferenceModel

PROMPTS = ["chat_en", "code", "multi", "long"]
N_GREEDY = 64


@pytest.fixture(scope="module")
def facts(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "smollm2_q4_1" / "golden.json").read_text())


@pytest.fixture(scope="module")
def arrays(golden: Path) -> dict[str, NDArray]:
    with np.load(golden / "smollm2_q4_1" / "golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine.load(smollm2_path, EngineOptions(n_threads=2, kv_bytes=128 << 20))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> ReferenceModel:
    return ReferenceModel.load(smollm2_path)


def log_softmax(logits: NDArray) -> NDArray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def tokens_of(facts: dict[str, Any], prompt: str) -> NDArray[np.int32]:
    return np.array(facts["prompts"][prompt]["input_ids"], np.int32)


def first_difference(found: list[int], prompt: dict[str, Any]) -> float | None:
    """The oracle's margin at the first greedy token that differs, None when none does."""
    for i, token in enumerate(found):
        if token != prompt["greedy_64_ids"][i]:
            return prompt["greedy_margins"][i]
    return None


def greedy(logits: NDArray, next_logits: Callable[[int], NDArray], n: int) -> list[int]:
    found = []
    for _ in range(n):
        found.append(int(logits.argmax()))
        logits = next_logits(found[-1])
    return found


@pytest.fixture(scope="module")
def scored(engine, facts) -> NDArray[np.float32]:
    """Logits of the 1,000-token text."""
    sequence = engine.new_sequence()
    logits = engine.forward([Chunk(sequence, np.array(facts["ppl"]["input_ids"], np.int32), "all")])[0]
    sequence.release()
    return logits


@pytest.fixture(scope="module")
def exact(reference, facts) -> NDArray[np.float32]:
    """The same by the float path."""
    return reference.forward(np.array(facts["ppl"]["input_ids"], np.int32)).logits


def nll(logits: NDArray, facts: dict[str, Any]) -> NDArray:
    ids = np.array(facts["ppl"]["input_ids"])
    return -log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]


def test_the_float_path_is_the_oracle(exact, facts, arrays):
    assert np.exp(abs(nll(exact, facts).mean() - facts["ppl"]["mean_nll"])) - 1 <= 1e-4
    assert np.abs(nll(exact, facts) - arrays["ppl.nll"]).max() <= 2e-3
    assert np.mean(exact.argmax(axis=-1) == arrays["ppl.top1"]) >= 0.999


@pytest.mark.parametrize("prompt", [*PROMPTS[:3], pytest.param("long", marks=pytest.mark.slow)])
def test_the_float_paths_logits_and_rows(reference, facts, arrays, prompt):
    output = reference.forward(tokens_of(facts, prompt))
    assert np.abs(output.logits[-1] - arrays[f"{prompt}.logits_last"]).max() <= 2e-3
    if prompt == "chat_en":
        layers = arrays["chat_en.kv_layers"]
        n = arrays["chat_en.k"].shape[1]
        assert np.abs(output.k[layers][:, :n] - arrays["chat_en.k"]).max() <= 2e-3
        assert np.abs(output.v[layers][:, :n] - arrays["chat_en.v"]).max() <= 2e-3


def test_the_float_paths_greedy_text(reference, facts):
    prompt = facts["prompts"]["chat_en"]
    found = reference.forward(tokens_of(facts, "chat_en"), n_greedy=8).greedy_ids.tolist()
    margin = first_difference(found, prompt)
    assert margin is None or margin <= 0.01


def test_perplexity_and_agreement(scored, exact, facts, arrays):
    assert abs(nll(scored, facts).mean() - facts["ppl"]["mean_nll"]) <= 0.015
    top = scored.argmax(axis=-1)
    assert np.mean(top == arrays["ppl.top1"]) >= 0.94
    disagreeing = exact[top != exact.argmax(axis=-1)]
    best_two = np.partition(disagreeing, -2, axis=-1)[:, -2:]
    assert (best_two[:, 1] - best_two[:, 0]).max() <= 0.6


def test_divergence_from_the_float_path(scored, exact):
    p, q = log_softmax(exact[::5]), log_softmax(scored[::5])  # every fifth position is plenty
    assert (np.exp(p) * (p - q)).sum(axis=-1).mean() <= 0.006
    assert np.sqrt(np.mean((scored - exact) ** 2)) <= 0.35
    best, found = (np.argpartition(logits[::5], -20, axis=-1)[:, -20:] for logits in (exact, scored))
    overlaps = [len(set(a) & set(b)) for a, b in zip(best, found, strict=True)]
    assert np.mean(overlaps) >= 16


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_and_their_greedy_continuation(engine, facts, arrays, prompt):
    sequence = engine.new_sequence()

    def next_logits(token: int) -> NDArray:
        return engine.forward([Chunk(sequence, np.array([token], np.int32))])[0][0]

    logits = engine.forward([Chunk(sequence, tokens_of(facts, prompt))])[0][0]
    oracle = arrays[f"{prompt}.logits_last"]
    assert np.sqrt(np.mean((logits - oracle) ** 2)) <= 0.35
    assert len(set(np.argsort(-logits)[:20]) & set(np.argsort(-oracle)[:20])) >= 16
    margin = first_difference(greedy(logits, next_logits, N_GREEDY), facts["prompts"][prompt])
    assert margin is None or margin <= 0.6
    sequence.release()


def test_cached_rows_are_the_oracles_after_rope_and_head_major(engine, facts, arrays):
    sequence = engine.new_sequence()
    engine.forward([Chunk(sequence, tokens_of(facts, "chat_en"), "none")])
    for i, layer in enumerate(arrays["chat_en.kv_layers"]):
        n, kv_dim = arrays["chat_en.k"][i].shape
        k, v = np.empty((n, kv_dim), np.float32), np.empty((n, kv_dim), np.float32)
        sequence.read_rows(int(layer), 0, n, k, v)
        for found, oracle in ((k, arrays["chat_en.k"][i]), (v, arrays["chat_en.v"][i])):
            assert np.sqrt(np.mean((found - oracle) ** 2)) <= 0.05 * np.sqrt(np.mean(oracle**2))
    sequence.release()
