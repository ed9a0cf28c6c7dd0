"""The bit contract on every architecture: what a row becomes never depends on how the work was cut."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.kernels.instruction_sets import KERNEL_PATH_VARIABLE

spec = importlib.util.spec_from_file_location("recorded_models", Path(__file__).parent / "recorded_models.py")
models = importlib.util.module_from_spec(spec)
sys.modules["recorded_models"] = models
spec.loader.exec_module(models)

Plain = tuple[Engine, np.ndarray, bytes]


@pytest.fixture(scope="module", params=models.TEXT_MODELS)
def plain(request: pytest.FixtureRequest, recorded: Callable[[str], Path]) -> Iterator[Plain]:
    """An engine with one thread, 100 tokens, and what they become in one chunk, alone."""
    folder = recorded(request.param)
    tokens = load_file(folder / "golden.safetensors")["p300.input_ids"][:100].astype(np.int32)
    engine = Engine.load(folder / "model", EngineOptions(n_threads=1, kv_bytes=models.KV_BYTES))
    yield engine, tokens, models.bits(engine, *models.run(engine, tokens, [512]))
    engine.close()


@pytest.mark.parametrize("sizes", [[1], [7], [33], [1, 5, 3, 40, 2]], ids=str)
def test_any_chunking(plain: Plain, sizes: list[int]) -> None:
    engine, tokens, expected = plain
    assert models.bits(engine, *models.run(engine, tokens, sizes)) == expected


def test_beside_other_sequences_and_restored(plain: Plain) -> None:
    """Others' tokens share experts and tiles with these; half of the rows were computed by another sequence."""
    engine, tokens, expected = plain
    computed, first_logits = models.run(engine, tokens[:50], [50])
    k, v = models.rows(engine, computed)
    mine, others = engine.new_sequence(), [engine.new_sequence() for _ in range(2)]
    for layer in range(engine.geometry.n_layers):
        mine.write_rows(layer, 0, k[layer], v[layer])
    mine.commit(50)
    parts = [first_logits]
    for start in range(50, 100, 11):
        batch = [
            Chunk(others[0], tokens[start : start + 1]),
            Chunk(mine, tokens[start : min(start + 11, 100)], "all"),
            Chunk(others[1], tokens[start - 50 : start - 31], "none"),
        ]
        parts.append(engine.forward(batch)[1])
    assert models.bits(engine, mine, np.concatenate(parts)) == expected
    for sequence in (computed, *others):
        sequence.release()


def test_any_number_of_threads(plain: Plain, recorded: Callable[[str], Path], request: pytest.FixtureRequest) -> None:
    _, tokens, expected = plain
    folder = recorded(request.node.callspec.params["plain"])
    engine = Engine.load(folder / "model", EngineOptions(n_threads=3, kv_bytes=models.KV_BYTES))
    try:
        for sizes in ([512], [1, 2, 30]):
            assert models.bits(engine, *models.run(engine, tokens, sizes)) == expected
    finally:
        engine.close()


OTHER_PATH = """
import hashlib, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
import recorded_models as models
from kvferry.engine.engine import Engine, EngineOptions
tokens = np.arange(40, dtype=np.int32)
for folder in sys.argv[2:]:
    engine = Engine.load(Path(folder), EngineOptions(n_threads=1, kv_bytes=models.KV_BYTES))
    print(engine.kernel_path, hashlib.sha256(models.bits(engine, *models.run(engine, tokens, [30, 1, 9]))).hexdigest())
    engine.close()
"""


@pytest.mark.parametrize("path", ["avx2", "generic"])
def test_any_instruction_set(path: str, recorded: Callable[[str], Path]) -> None:
    folders = [recorded(name) / "model" for name in ("qwen2_bias_f32", "qwen3_tied_bf16", "qwen3moe_bf16_sharded")]
    expected = []
    for folder in folders:
        engine = Engine.load(folder, EngineOptions(n_threads=1, kv_bytes=models.KV_BYTES))
        if path == "avx2" and engine.kernel_path not in {"avx2", "avxvnni", "avx512vnni"}:
            pytest.skip(f"this processor runs {engine.kernel_path}, not avx2")
        found = models.bits(engine, *models.run(engine, np.arange(40, dtype=np.int32), [512]))
        expected += [path, hashlib.sha256(found).hexdigest()]
        engine.close()
    command = [sys.executable, "-c", OTHER_PATH, str(Path(__file__).parent), *map(str, folders)]
    environment = os.environ | {KERNEL_PATH_VARIABLE: path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
