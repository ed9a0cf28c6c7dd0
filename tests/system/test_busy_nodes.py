"""Nodes that get a tenth of the time and are alive all the same (promise 19)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.client.sdk import Client
from kvferry.drills.cluster import LocalCluster
from kvferry.drills.conversation import hold_turn

from .rig import Control, placed_on, question

PERIOD_S = 0.2
SHARE = 0.1


def slow(seconds: float) -> Any:
    return pytest.param(seconds, marks=[pytest.mark.slow, pytest.mark.timeout(seconds + 300)])


@contextlib.contextmanager
def a_tenth_of_the_time(cluster: LocalCluster) -> Iterator[None]:
    """Every node runs for a tenth of each period and is stopped for the rest, one after the other."""
    ended = threading.Event()

    def slow_down(node_id: str) -> None:
        while not ended.is_set():
            cluster.freeze_node(node_id)
            time.sleep(PERIOD_S * (1 - SHARE))
            cluster.thaw_node(node_id)
            time.sleep(PERIOD_S * SHARE)

    with ThreadPoolExecutor(len(cluster.nodes)) as pool:
        slowed = [pool.submit(slow_down, node_id) for node_id in cluster.nodes]
        try:
            yield
        finally:
            ended.set()
            for one in slowed:
                one.result()


@pytest.mark.parametrize("seconds", [slow(75), slow(600)])
def test_19_nodes_that_are_ten_times_slower_keep_their_turns(
    cluster: LocalCluster, control: Control, seconds: float
) -> None:
    """Two sessions ask one question after the other; no turn is ever taken from the node that has it."""
    cluster.ensure_all_live()
    numbers = itertools.count()

    def keep_asking(client: Client, ends_at: float) -> int:
        n_answered = 0
        while time.monotonic() < ends_at:
            turn = question(next(numbers))
            session = client.create_session()
            log = hold_turn(session, turn)
            assert len(placed_on(log)) == 1
            control.assert_same([turn], [log.record], session)
            n_answered += 1
        return n_answered

    with Client(cluster.address, patience_s=60) as client, ThreadPoolExecutor(2) as pool:
        ends_at = time.monotonic() + seconds
        with a_tenth_of_the_time(cluster):
            asking = [pool.submit(keep_asking, client, ends_at) for _ in range(2)]
            n_answered = [one.result() for one in asking]
        print(f"{sum(n_answered)} turns in {seconds:.0f} s, none moved")
        assert min(n_answered) >= 2
        assert all(node.state == "live" for node in client.nodes())
