"""A probe is answered soon, also about a coordinator that says nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """The address of a coordinator that hangs: it takes connections and no more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_cluster_whose_coordinator_hangs_is_not_healthy_and_that_is_told_soon(new_gateway, silent):
    gateway = new_gateway(silent)
    began = time.monotonic()
    answer = httpx.get(f"{gateway}/health", timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert time.monotonic() - began < 10, "a probe would have given up; requests wait for a minute"


def test_one_of_several_coordinators_is_enough(new_gateway, cluster, silent):
    gateway = new_gateway(f"{silent},{cluster.address}")
    assert httpx.get(f"{gateway}/health", timeout=30).json()["status"] == "ok"
