"""The int8 engine against what the oracle recorded, within what int8 costs on these very models."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.kv_cache import KvSequence

spec = importlib.util.spec_from_file_location("recorded_models", Path(__file__).parent / "recorded_models.py")
models = importlib.util.module_from_spec(spec)
sys.modules["recorded_models"] = models
spec.loader.exec_module(models)

PROMPTS = ("p5", "p37", "p300")
RMS_RATIO = 1.7  # the tolerance guide's
CLEAR_ROUTER_MARGIN = 0.1  # below it int8 may send a token to another expert, which is no error
CLEAR_MARGIN = 0.6


@pytest.mark.parametrize("name", models.TEXT_MODELS)
def test_logits_rows_and_greedy_text(name: str, recorded: Callable[[str], Path]) -> None:
    folder = recorded(name)
    golden = load_file(folder / "golden.safetensors")
    facts = json.loads((folder / "golden.json").read_text())
    engine = Engine.load(folder / "model", EngineOptions(n_threads=2, kv_bytes=models.KV_BYTES))
    n_judged = 0
    try:
        for prompt in PROMPTS:
            expected = {key.split(".", 1)[1]: value for key, value in golden.items() if key.startswith(f"{prompt}.")}
            ids = expected["input_ids"].astype(np.int32)
            sequence, logits = models.run(engine, ids, [512])
            simulated = facts["sim_int8"]["w8a8_kv8"][prompt]
            allowed = RMS_RATIO * simulated.get("with_forced_routing", simulated)["rms"]
            clear = clearly_routed(expected)
            positions = expected["logit_positions"][:clear]
            if clear == 0:
                sequence.release()
                continue
            n_judged += 1
            assert rms(logits[positions] - expected["logits"][:clear]) <= allowed
            k, v = models.rows(engine, sequence)
            for found, theirs in ((k, expected["k"]), (v, expected["v"])):
                assert rms(found[:, positions] - theirs[:, :clear]) <= 0.06 * rms(theirs)
            if clear == len(ids):
                assert_same_greedy(engine, sequence, logits[-1], expected, facts["prompts"][prompt])
            sequence.release()
        assert n_judged > 0
    finally:
        engine.close()


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def clearly_routed(expected: dict[str, Any]) -> int:
    """How many of the recorded positions come before one that a little noise may route otherwise."""
    if "router_logits" not in expected:
        return len(expected["logit_positions"])
    n_active = expected["router_topk_ids"].shape[-1]
    ordered = np.sort(expected["router_logits"], axis=-1)
    margins = (ordered[..., -n_active] - ordered[..., -n_active - 1]).min(axis=0)
    unclear = np.flatnonzero(margins < CLEAR_ROUTER_MARGIN)
    return int(unclear[0]) if len(unclear) else len(margins)


def assert_same_greedy(
    engine: Engine, sequence: KvSequence, logits: Any, expected: dict[str, Any], facts: dict[str, Any]
) -> None:
    """The oracle's tokens up to the first step that it was not sure of (with experts: that is below 0.3)."""
    n_steps = len(expected["greedy_ids"])
    if "router_logits" in expected:
        limit = facts["first_step_margin_below_0p3"]
        n_steps = n_steps if limit is None else limit
    for i in range(n_steps):
        found = int(np.argmax(logits))
        if found != expected["greedy_ids"][i]:
            assert expected["greedy_margins"][i] <= CLEAR_MARGIN
            return
        logits = engine.forward([Chunk(sequence, np.array([found], np.int32))])[0][0]
