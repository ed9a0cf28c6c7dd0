"""The bit contract on random cases: chunks, threads, batch mixes, KV kinds and restored prefixes change no bit."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.files.gguf_file import GgufFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kv_cache import KvKind, KvSequence
from kvferry.engine.packing import pack_model

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parent / "tiny_models.py")
tiny = importlib.util.module_from_spec(spec)
sys.modules["tiny_models"] = tiny
spec.loader.exec_module(tiny)

N_TOKENS = 140
N_CASES = 200
KINDS = list(KvKind)
SHAPES = ["grouped by three", "small heads, untied"]

Computed = tuple[bytes, list[NDArray]]


@dataclass(frozen=True)
class Bench:
    """One model and KV kind: engines by number of threads, and what the plain run computed."""

    engines: dict[int, Engine]
    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    stored: list[tuple[NDArray, ...]]  # planes of each layer


def stored_rows(engine: Engine, sequence: KvSequence) -> list[tuple[NDArray, ...]]:
    found = []
    for layer in range(engine.geometry.n_layers):
        planes = engine.geometry.empty_planes(sequence.n_rows)
        sequence.read_planes(layer, 0, sequence.n_rows, planes)
        found.append(planes)
    return found


def make_bench(file: GgufFile, kind: KvKind) -> Bench:
    engines = {
        n: Engine(
            pack_model(open_model(file.path), 512), EngineOptions(n_threads=n, kv_bytes=1 << 22, kv=kind), "0" * 32
        )
        for n in (1, 2, 3)
    }
    tokens = np.random.default_rng(5).integers(0, 64, N_TOKENS).astype(np.int32)
    sequence = engines[1].new_sequence()
    logits = engines[1].forward([Chunk(sequence, tokens, "all")])[0]
    stored = stored_rows(engines[1], sequence)
    sequence.release()
    return Bench(engines, tokens, logits, stored)


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    files = [tiny.write_model(folder / f"{i}.gguf", tiny.SHAPES[name]) for i, name in enumerate(SHAPES)]
    made = [make_bench(file, kind) for file in files for kind in KINDS]
    yield made
    for bench in made:
        for engine in bench.engines.values():
            engine.close()


@pytest.mark.parametrize("seed", range(N_CASES))
def test_a_random_case(benches, seed):
    random = np.random.default_rng(seed)
    bench = benches[seed % len(benches)]
    engine = bench.engines[int(random.integers(1, 4))]
    mine, other = engine.new_sequence(), engine.new_sequence()
    restored = int(random.integers(0, N_TOKENS)) if random.random() < 0.5 else 0
    if restored:
        for layer, planes in enumerate(bench.stored):
            mine.write_planes(layer, 0, tuple(plane[:restored].copy() for plane in planes))
        mine.commit(restored)
    parts = [bench.logits[:restored]]
    while mine.n_rows < N_TOKENS:
        size = int(random.choice([1, 2, 3, 7, 32, 33, 140]))
        batch = [Chunk(mine, bench.tokens[mine.n_rows : mine.n_rows + size], "all")]
        if random.random() < 0.5 and other.n_rows < 100:
            beside = random.integers(0, 64, random.integers(1, 40)).astype(np.int32)
            batch.insert(int(random.integers(0, 2)), Chunk(other, beside, "last"))
        results = engine.forward(batch)
        parts.append(next(r for chunk, r in zip(batch, results, strict=True) if chunk.sequence is mine))
    assert np.concatenate(parts).tobytes() == bench.logits.tobytes()
    for got, expected in zip(stored_rows(engine, mine), bench.stored, strict=True):
        assert [plane.tobytes() for plane in got] == [plane.tobytes() for plane in expected]
    mine.release()
    other.release()
