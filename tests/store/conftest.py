"""What the store's tests share: the golden files, a small geometry, rows to publish, and stores in temporary
directories."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry, TokenIds
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

GOLDEN = Path(__file__).parents[1] / "golden" / "vlkv"
FINGERPRINT = "0123456789abcdef0123456789abcdef"

MakeStore = Callable[..., SnapshotStore]
MakeRows = Callable[[KvGeometry, int], MemoryRows]


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / "manifest.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def golden_rows() -> MemoryRows:
    """The rows that the golden files hold: k and v, float32 [3, 72, 128]."""
    arrays = load_file(GOLDEN / "rows.safetensors")
    return MemoryRows(arrays["k"], arrays["v"])


@pytest.fixture(scope="session")
def golden_ids() -> TokenIds:
    ids: TokenIds = load_file(GOLDEN / "rows.safetensors")["token_ids"]
    return ids


@pytest.fixture(scope="session")
def golden_geometry() -> KvGeometry:
    return KvGeometry(3, 2, 64)


@pytest.fixture(scope="session")
def tiny() -> KvGeometry:
    """Rows of 64 bytes per layer and token: files stay small, the layout is the real one."""
    return KvGeometry(3, 2, 4)


@pytest.fixture(scope="session")
def make_rows() -> MakeRows:
    """Rows that are different at every layer and position."""

    def make(geometry: KvGeometry, n_rows: int) -> MemoryRows:
        shape = (geometry.n_layers, n_rows, geometry.kv_dim)
        k = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        return MemoryRows(k, -1 - k)

    return make


@pytest.fixture
def make_store(tmp_path: Path, tiny: KvGeometry) -> MakeStore:
    """Stores on one directory, as different nodes would open it; unique names are counted, not drawn."""
    counter = itertools.count(1)

    def make(
        node_id: str = "node-1",
        *,
        root: Path = tmp_path,
        geometry: KvGeometry = tiny,
        vocab_size: int = 1024,
        max_bytes: int = 1 << 30,
        max_files: int = 1000,
        trash_grace_s: float = 120,
        fs: FileSystem | None = None,
        fingerprint: str = FINGERPRINT,
        version: Literal[1, 3] = 1,
    ) -> SnapshotStore:
        return SnapshotStore(
            root,
            fingerprint,
            geometry,
            vocab_size,
            max_bytes,
            max_files,
            node_id,
            trash_grace_s=trash_grace_s,
            fs=fs,
            unique=lambda: f"{next(counter):032x}",
            version=version,
        )

    return make
