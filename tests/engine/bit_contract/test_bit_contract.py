"""The bit contract on the real model: K/V rows and logits never depend on how the work was cut.

Everything is compared with one digest of one plain run: 203 tokens in one chunk, alone, one thread. Instruction sets
and KV kinds: test_random_cases.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.kv_cache import KvSequence

N_TOKENS = 203
KV_BYTES = 256 << 20


@pytest.fixture(scope="module")
def token_ids(golden: Path) -> NDArray[np.int32]:
    facts = json.loads((golden / "smollm2_q4_1" / "golden.json").read_text())
    return np.array(facts["prompts"]["long"]["input_ids"], np.int32)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine.load(smollm2_path, EngineOptions(n_threads=1, kv_bytes=KV_BYTES))
    yield engine
    engine.close()


def run(engine: Engine, tokens: NDArray[np.int32], sizes: Sequence[int]) -> tuple[KvSequence, NDArray[np.float32]]:
    """Append the tokens in chunks of these sizes, over and over; returns the sequence and all logits."""
    sequence = engine.new_sequence()
    parts, start, i = [], 0, 0
    while start < len(tokens):
        part = tokens[start : start + sizes[i % len(sizes)]]
        parts.append(engine.forward([Chunk(sequence, part, "all")])[0])
        start += len(part)
        i += 1
    return sequence, np.concatenate(parts)


def rows(engine: Engine, sequence: KvSequence, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    k = np.empty((sequence.n_rows, engine.geometry.kv_dim), np.float32)
    v = np.empty_like(k)
    sequence.read_rows(layer, 0, sequence.n_rows, k, v)
    return k, v


def digest(engine: Engine, sequence: KvSequence, logits: NDArray[np.float32]) -> str:
    found = hashlib.sha256(logits.tobytes())
    for layer in range(engine.geometry.n_layers):
        for array in rows(engine, sequence, layer):
            found.update(array.tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def plain(engine: Engine, token_ids: NDArray[np.int32]) -> str:
    sequence, logits = run(engine, token_ids[:N_TOKENS], [512])
    found = digest(engine, sequence, logits)
    sequence.release()
    return found


@pytest.mark.parametrize("sizes", [[1], [7], [32], [33], [1, 5, 3, 40, 2]], ids=str)
def test_any_chunking(engine, plain, token_ids, sizes):
    sequence, logits = run(engine, token_ids[:N_TOKENS], sizes)
    assert digest(engine, sequence, logits) == plain
    sequence.release()


@pytest.mark.parametrize("n_threads", [2, 3])
def test_any_number_of_threads(smollm2_path, plain, token_ids, n_threads):
    engine = Engine.load(smollm2_path, EngineOptions(n_threads=n_threads, kv_bytes=KV_BYTES))
    try:
        for sizes in ([512], [33], [1, 2, 3, 4, 5]):
            sequence, logits = run(engine, token_ids[:N_TOKENS], sizes)
            assert digest(engine, sequence, logits) == plain
            sequence.release()
    finally:
        engine.close()


def test_beside_three_other_sequences(engine, plain, token_ids):
    """Prefills and single-token decodes of others in the same steps, at other positions, change nothing."""
    mine = engine.new_sequence()
    others = [engine.new_sequence() for _ in range(3)]
    parts = []
    for step, start in enumerate(range(0, N_TOKENS, 29)):
        chunk = Chunk(mine, token_ids[start : min(start + 29, N_TOKENS)], "all")
        beside = [
            Chunk(others[0], token_ids[400 + step : 401 + step], "last"),
            Chunk(others[1], token_ids[300 + 17 * step : 300 + 17 * (step + 1)], "none"),
            Chunk(others[2], token_ids[500 + step : 501 + step], "all"),
        ]
        batch = [*beside[:2], chunk, beside[2]]
        parts.append(engine.forward(batch)[2])
    assert digest(engine, mine, np.concatenate(parts)) == plain
    for sequence in (mine, *others):
        sequence.release()


@pytest.mark.parametrize("n_restored", [1, 31, 32, 64, 100, 202])
def test_restored_rows_and_computed_rows_are_the_same(engine, plain, token_ids, n_restored):
    """Rows written back into other blocks, where stale numbers lie beyond them, go on exactly as the computed ones."""
    computed, logits = run(engine, token_ids[:N_TOKENS], [512])
    assert digest(engine, computed, logits) == plain
    soil_free_blocks(engine)
    restored = engine.new_sequence()
    for layer in range(engine.geometry.n_layers):
        k, v = rows(engine, computed, layer)
        restored.write_rows(layer, 0, k[:n_restored].copy(), v[:n_restored].copy())
    restored.commit(n_restored)
    tail = engine.forward([Chunk(restored, token_ids[n_restored:N_TOKENS], "all")])[0]
    assert digest(engine, restored, np.concatenate([logits[:n_restored], tail])) == plain
    computed.release()
    restored.release()


def test_a_fork_goes_on_as_its_original(engine, plain, token_ids):
    original, logits = run(engine, token_ids[:150], [150])
    fork = original.fork(100)
    original_end = engine.forward([Chunk(original, token_ids[150:N_TOKENS], "all")])[0]
    soil_free_blocks(engine)
    fork_end = engine.forward([Chunk(fork, token_ids[100:N_TOKENS], "all")])[0]
    assert digest(engine, original, np.concatenate([logits, original_end])) == plain
    assert digest(engine, fork, np.concatenate([logits[:100], fork_end])) == plain
    original.release()
    fork.release()


def soil_free_blocks(engine: Engine) -> None:
    """Fill all free blocks with numbers that no arithmetic survives."""
    blocks = engine.pool.allocate(min(engine.pool.n_free_blocks, 16))
    engine.pool.tiles[blocks] = np.nan
    engine.pool.release(blocks)


def test_a_long_text_in_large_and_small_steps(engine, token_ids):
    """768 tokens cross the pass limit of 512 and many blocks; the last logits and all rows agree."""
    whole, logits = run(engine, token_ids, [768])
    cut, cut_logits = run(engine, token_ids, [512, 33, 1, 100])
    assert digest(engine, whole, logits) == digest(engine, cut, cut_logits)
    whole.release()
    cut.release()
