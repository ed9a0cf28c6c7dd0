from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from .running_node import SABOTAGED, RunningNode, running_node

_numbers = count(100)


@pytest.fixture(scope="session")
def prompts(golden: Path) -> dict[str, list[int]]:
    """Token ids of the oracle's prompts: chat_en, code, multi, long (longest)."""
    recorded = json.loads((golden / "smollm2_q4_1" / "golden.json").read_text())
    return {name: prompt["input_ids"] for name, prompt in recorded["prompts"].items()}


@pytest.fixture
def own() -> Callable[[list[int]], list[int]]:
    """A prompt that begins like no other test's, so that nothing of theirs in memory or store is of use."""
    number = next(_numbers)
    return lambda prompt: [number, *prompt]


@pytest.fixture
def session() -> str:
    """A session that no other test uses."""
    return f"session-{next(_numbers)}"


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningNode]:
    """See `node`."""
    folder = tmp_path_factory.mktemp("alone")
    with running_node(folder, smollm2_path, "--context", "2048", "--max-running", "4") as node:
        yield node


@pytest.fixture
def node(shared_node: RunningNode) -> RunningNode:
    """A node without a store that all tests share, with nothing in memory."""
    shared_node.drop_all()
    return shared_node


@contextlib.contextmanager
def _stored(folder: Path, model: Path, *flags: str) -> Iterator[RunningNode]:
    flags = ("--store", str(folder / "store"), "--publish-every-tokens", "96", "--context", "2048", *flags)
    with running_node(folder, model, *flags, program=SABOTAGED) as node:
        yield node


@pytest.fixture(scope="session")
def shared_stored(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningNode]:
    """See `stored`."""
    with _stored(tmp_path_factory.mktemp("stored"), smollm2_path) as node:
        yield node


@pytest.fixture(scope="session")
def shared_hasty(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningNode]:
    """See `stored`."""
    with _stored(tmp_path_factory.mktemp("hasty"), smollm2_path, "--store-stall-seconds", "0.5") as node:
        yield node


@pytest.fixture
def stored(request: pytest.FixtureRequest) -> Iterator[RunningNode]:
    """A node with a store (in `store_of`) that all tests share, with nothing in memory; its store and its engine can be
    made to misbehave. Where nothing runs beside, its store counts as hung after half a second."""
    is_alone = request.node.get_closest_marker("alone") is not None
    node: RunningNode = request.getfixturevalue("shared_hasty" if is_alone else "shared_stored")
    node.drop_all()
    yield node
    node.orders.unlink(missing_ok=True)
    node.wait_for("load.store_ok and load.n_running + load.n_queued == 0")


@pytest.fixture
def store_of(stored: RunningNode) -> Path:
    """The folder of `stored` for its model's snapshots."""
    return stored.log_path.parent / "store" / stored.status().fingerprint


@pytest.fixture(scope="session")
def shared_small(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningNode]:
    """See `small`."""
    folder = tmp_path_factory.mktemp("small")
    flags = ("--store", str(folder / "store"), "--store-stall-seconds", "0.5", "--kv-memory", "20MiB")
    with running_node(folder, smollm2_path, *flags, "--max-running", "1", program=SABOTAGED) as node:
        yield node


@pytest.fixture
def small(shared_small: RunningNode) -> Iterator[RunningNode]:
    """A node with a store, one turn at a time and room for 14 blocks of 32 rows, with nothing in memory."""
    shared_small.drop_all()
    yield shared_small
    shared_small.orders.unlink(missing_ok=True)
    shared_small.wait_for("load.store_ok and load.n_running + load.n_queued == 0")
