"""Threads whose cores are taken away change no bit and hold nobody up: beside busy neighbours, and in made-up cases."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvferry.engine.batch import StepSlots
from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.kernels.forward import PHASES_PER_LAYER
from kvferry.engine.kernels.work import PHASE_BYTES, RETRIED_ROWS
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.threads import WorkerThreads

MODELS = ["llama, three heads to one", "qwen3", "qwen3_moe"]
# One process on each core that never sleeps; each ends by itself if it is forgotten.
_HOG = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.monotonic() + 100
print("busy", flush=True)
while time.monotonic() < end: pass
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


synthetic_models = sys.modules.get("synthetic_models") or load("synthetic_models")


def make_engine(name: str, n_threads: int) -> Engine:
    file, packed = synthetic_models.model(name)
    return Engine(packed, EngineOptions(n_threads, 1 << 22, kv=KvKind.Q8), "0" * 32, file)


def conversation(engine: Engine, n_rounds: int = 6) -> str:
    """The digest of prompts, single tokens, small batches of them, and a long chunk beside."""
    random = np.random.Generator(np.random.Philox(7))
    sequences = [engine.new_sequence() for _ in range(3)]
    found = hashlib.sha256()

    def step(*sizes: int, logits: Any = "last") -> None:
        chunks = [
            Chunk(sequence, random.integers(0, 80, n).astype(np.int32), logits)
            for sequence, n in zip(sequences, sizes, strict=False)
            if n
        ]
        for part in engine.forward(chunks):
            found.update(part.tobytes())

    step(35, 2, 9, logits="all")
    for _ in range(n_rounds):
        step(1)
        step(1, 1, 1)
        step(3, 7, 5)
        step(0, 1, 1)
        step(40, 1, logits="none")
    for sequence in sequences:
        for layer in range(engine.geometry.n_layers):
            planes = engine.geometry.empty_planes(sequence.n_rows)
            sequence.read_planes(layer, 0, sequence.n_rows, planes)
            for plane in planes:
                found.update(plane.tobytes())
        sequence.release()
    return found.hexdigest()


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What each model computes with one thread."""
    found = {}
    for name in MODELS:
        engine = make_engine(name, 1)
        found[name] = conversation(engine)
        engine.close()
    return found


@pytest.fixture
def neighbours() -> Iterator[None]:
    """A busy process on every core."""
    running = [
        subprocess.Popen([sys.executable, "-c", _HOG, str(core)], stdout=subprocess.PIPE)
        for core in os.sched_getaffinity(0)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
    yield
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("n_threads", [2, 3, 5])
@pytest.mark.parametrize("name", MODELS)
def test_beside_busy_neighbours_the_bits_stay(alone, neighbours, name: str, n_threads: int):
    engine = make_engine(name, n_threads)
    for _ in range(30):
        assert conversation(engine) == alone[name]
    engine.close()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", MODELS)
def test_a_thread_that_hardly_ever_runs_holds_nobody_up(alone, neighbours, name: str):
    """At idle priority beside a busy neighbour a thread runs for a moment every now and then, and stops anywhere."""
    engine = make_engine(name, 2)
    (worker,) = engine._workers._threads
    assert worker.native_id is not None
    os.sched_setscheduler(worker.native_id, os.SCHED_IDLE, os.sched_param(0))
    for _ in range(30):
        assert conversation(engine) == alone[name]
    engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_thread_that_never_comes_is_not_waited_for(alone, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(WorkerThreads, "start", lambda *_: None)
    engine = make_engine(name, 3)
    assert conversation(engine) == alone[name]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", MODELS)
def test_what_a_thread_took_and_never_finished_is_computed_by_another(
    alone, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Of every phase that is retried, somebody has taken the first portion before anybody comes, and is gone."""
    fill = StepSlots.fill
    n_lost: list[int] = []

    def fill_and_lose(slots: StepSlots, slot: int, chunks: Any, start: int, stop: int, logits_at: int) -> int:
        n_logit_rows = fill(slots, slot, chunks, start, stop, logits_at)
        if stop - start <= RETRIED_ROWS:
            taken = slots.phases[slot].reshape(-1, PHASE_BYTES // 8)[:, 0]
            retried = (0, 1, 2, 3, 4, 5, 8, 9, 10) if "moe" in name else (0, 1, 2, 3, 4, 5, 6)
            for layer in range(slots.phases.shape[1] * 8 // PHASE_BYTES // PHASES_PER_LAYER):
                taken[[layer * PHASES_PER_LAYER + number for number in retried]] = 1
            n_lost.append(1)
        return n_logit_rows

    monkeypatch.setattr(StepSlots, "fill", fill_and_lose)
    engine = make_engine(name, 2)
    assert conversation(engine) == alone[name]
    engine.close()
    assert len(n_lost) > 10
