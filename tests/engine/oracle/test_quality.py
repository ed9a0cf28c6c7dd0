"""The engine's numbers against the recorded oracle, within the tolerance guide."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.bench.quality import LIMITS, DemoModel, Quality, compare, log_softmax
from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.kv_cache import KvKind
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
def demo(golden, smollm2_path) -> DemoModel:
    """The recorded answers, and the float path's logits of the whole 1,000-token text."""
    return DemoModel(golden / "smollm2_q4_1", smollm2_path)


def nll(logits: NDArray, facts: dict[str, Any]) -> NDArray:
    ids = np.array(facts["ppl"]["input_ids"])
    return -log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]


def test_the_float_path_is_the_oracle(demo, facts, arrays):
    """What the other figures are measured against: the oracle's own logits of the text are too many to record."""
    assert np.exp(abs(nll(demo.exact, facts).mean() - facts["ppl"]["mean_nll"])) - 1 <= 1e-4
    assert np.abs(nll(demo.exact, facts) - arrays["ppl.nll"]).max() <= 2e-3
    assert np.mean(demo.exact.argmax(axis=-1) == arrays["ppl.top1"]) >= 0.999


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


@pytest.mark.parametrize(
    ("weights", "kv"),
    [
        ("as stored", KvKind.F32),
        ("as stored", KvKind.F16),
        ("as stored", KvKind.Q8),
        ("q8", KvKind.F16),
        ("q4", KvKind.Q8),
        *(
            pytest.param(weights, kv, marks=pytest.mark.slow)
            for weights, kv in [("q8", KvKind.F32), ("q8", KvKind.Q8), ("q4", KvKind.F32), ("q4", KvKind.F16)]
        ),
    ],
)
def test_weights_and_rows_of_every_kind_stay_within_the_guide(demo, weights, kv):
    """Perplexity, best tokens, divergence, logits and greedy answers; `make bench-quality` prints them all."""
    engine = demo.engine(weights, kv, n_threads=2)
    try:
        found = demo.quality(engine)
        assert not found.beyond(), found
        assert demo.greedy_margin(engine) <= LIMITS.flipped_margin
    finally:
        engine.close()


def test_one_scale_for_a_whole_row_would_be_too_coarse_for_the_guide(facts):
    """The limits tell a good path from a bad one: the oracle's simulation of both."""
    for name, is_good in (("a8_block32", True), ("a8_block32_f16scale_kv8", True), ("a8_per_token_row", False)):
        simulated = facts["sim_int8"][name]
        quality = Quality(
            perplexity=simulated["ppl"],
            nll_difference=simulated["delta_mean_nll"],
            top1=simulated["top1_agree"],
            flipped_margin=simulated["largest_margin_of_a_disagreement"],
            divergence=simulated["kl_mean"],
            rms=simulated["logits_rms"],
            top20=20,
        )
        assert (not quality.beyond()) is is_good


def test_the_same_logits_differ_by_nothing_and_a_swapped_best_token_shows():
    random = np.random.default_rng(0)
    exact = random.standard_normal((40, 100)).astype(np.float32)
    ids = random.integers(0, 100, 40).astype(np.int32)
    oracle_nll = -log_softmax(exact)[np.arange(39), ids[1:]].mean()
    same = compare(exact, exact, ids, oracle_nll)
    assert abs(same.nll_difference) < 1e-12
    assert (same.top1, same.flipped_margin, same.rms, same.top20) == (1.0, 0.0, 0.0, 20.0)
    assert abs(same.divergence) < 1e-12
    other = exact.copy()
    first, second = np.argsort(exact[3])[-1:-3:-1]
    other[3, [first, second]] = exact[3, [second, first]]
    swapped = compare(other, exact, ids, oracle_nll)
    assert swapped.top1 == 39 / 40
    assert swapped.flipped_margin == exact[3, first] - exact[3, second]
    assert swapped.divergence > 0


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
