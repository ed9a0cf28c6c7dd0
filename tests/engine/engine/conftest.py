"""Engines on small random models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.files.gguf_file import GgufFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.packing import pack_model

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """An engine on an opened file; closed at the end of the test."""
    engines: list[Engine] = []

    def make(
        file: GgufFile, *, n_threads: int = 1, kv_bytes: int = 1 << 22, max_batch_rows: int = 512, kv: str = "f32"
    ) -> Engine:
        options = EngineOptions(n_threads, kv_bytes, max_batch_rows=max_batch_rows, kv=KvKind(kv))
        engines.append(Engine(pack_model(open_model(file.path), file.config.context_length), options, "0" * 32))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def tokens() -> Callable[[int], np.ndarray]:
    """Some tokens of every tiny model's vocabulary."""
    return lambda n: np.random.default_rng(n).integers(0, 64, n).astype(np.int32)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"
