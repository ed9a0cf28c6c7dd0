from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.drills.cluster import LocalCluster
from kvferry.drills.model import DEFAULT_MODEL, ensure_model

from .rig import Control, options
from .tripped import Tripped

sys.path.insert(0, str(Path(__file__).parents[1] / "telemetry"))  # otlp_collector.py
sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))  # browser_kit.py


@pytest.fixture(scope="session")
def model() -> str:
    """The real model, fetched when it is not in the cache."""
    ensure_model(DEFAULT_MODEL)
    return DEFAULT_MODEL


@pytest.fixture(scope="session")
def control(model, tmp_path_factory) -> Iterator[Control]:
    """The truth: one node that nobody disturbs, with a store of its own."""
    with LocalCluster(options(model, tmp_path_factory.mktemp("control"), n_nodes=1)) as cluster:
        yield Control(cluster)


@pytest.fixture(scope="session")
def nodes(model, tmp_path_factory) -> Iterator[Tripped]:
    """Three for all tests, since starting them takes longer than most tests; each puts right what it broke."""
    nodes = Tripped(options(model, tmp_path_factory.mktemp("cluster")))
    with nodes.cluster:
        yield nodes


@pytest.fixture(scope="session")
def cluster(nodes) -> LocalCluster:
    """Theirs."""
    return nodes.cluster
