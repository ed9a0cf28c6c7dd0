from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .running_node import RunningNode, running_node


@pytest.fixture(scope="session")
def prompts(golden: Path) -> dict[str, list[int]]:
    """Token ids of the oracle's prompts: chat_en, code, multi, long (longest)."""
    recorded = json.loads((golden / "smollm2_q4_1" / "golden.json").read_text())
    return {name: prompt["input_ids"] for name, prompt in recorded["prompts"].items()}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningNode]:
    """A node without a store, shared by the tests of a module: each uses sessions of its own."""
    folder = tmp_path_factory.mktemp("alone")
    with running_node(folder, smollm2_path, "--context", "2048", "--max-running", "4") as node:
        yield node


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells a node started with SABOTAGED what to do wrong; not there yet."""
    path = tmp_path / "orders"
    monkeypatch.setenv("KVFERRY_TEST_SABOTAGE", str(path))
    return path
