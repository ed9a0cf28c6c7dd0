from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.node import fencing
from kvferry.node.errors import Draining, LeaseLost, StaleCoordinator, StaleEpoch
from kvferry.node.fencing import Fence
from kvferry.node.membership import Memberships


@given(epochs=st.lists(st.integers(0, 5), min_size=1))
def test_an_epoch_is_let_in_when_none_higher_was_seen(epochs: list[int]) -> None:
    fence = Fence()
    highest = 0
    for epoch in epochs:
        if epoch < highest:
            with pytest.raises(StaleEpoch, match=f"epoch {highest} here"):
                fence.admit("s", epoch, 0, now=0)
        else:
            fence.admit("s", epoch, 0, now=0)
            highest = epoch


def test_sessions_have_epochs_of_their_own() -> None:
    fence = Fence()
    fence.admit("a", 9, 0, now=0)
    fence.admit("b", 1, 0, now=0)


def test_an_older_coordinator_is_refused() -> None:
    fence = Fence()
    fence.admit("s", 1, 7, now=0)
    with pytest.raises(StaleCoordinator, match="generation 6 was replaced by 7"):
        fence.admit("s", 2, 6, now=0)
    fence.admit("s", 1, 8, now=0)


def test_a_coordinator_whose_registry_was_lost_counts_epochs_anew() -> None:
    fence = Fence()
    fence.admit("s", 9, 7, now=0)
    fence.admit("s", 1, 8, now=0)
    with pytest.raises(StaleEpoch, match="epoch 1 here"):
        fence.admit("s", 0, 8, now=0)
    with pytest.raises(StaleCoordinator):
        fence.admit("s", 10, 7, now=0)


def test_a_refused_turn_leaves_no_epoch_behind() -> None:
    fence = Fence(draining=True)
    with pytest.raises(Draining):
        fence.admit("s", 9, 0, now=0)
    fence.draining = False
    fence.admit("s", 1, 0, now=0)


def test_a_lease_counts_from_the_asking_and_ends_by_itself() -> None:
    fence = Fence()
    assert not fence.lease_lost(1e9)  # never had one: a node may serve before it finds its coordinator
    fence.renew_lease(asked_at=10.0, lease_seconds=3.0)
    fence.admit("s", 1, 0, now=12.9)
    with pytest.raises(LeaseLost):
        fence.admit("s", 1, 0, now=13.0)
    fence.renew_lease(asked_at=14.0, lease_seconds=3.0)
    fence.admit("s", 1, 0, now=14.1)


def test_the_memory_of_epochs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "MAX_EPOCHS", 3)
    fence = Fence()
    for name in "abcd":
        fence.admit(name, 5, 0, now=0)
    fence.admit("a", 1, 0, now=0)  # forgotten, the least recently seen
    with pytest.raises(StaleEpoch):
        fence.admit("d", 1, 0, now=0)


def test_each_coordinator_has_a_lease_of_its_own_and_a_stranger_lasts_as_long_as_any() -> None:
    fence = Fence()
    fence.renew_lease(asked_at=10.0, lease_seconds=3.0, coordinator="a")
    fence.renew_lease(asked_at=12.0, lease_seconds=3.0, coordinator="b")
    assert [fence.next_lease_end(now) for now in (12.0, 13.0, 15.0)] == [13.0, 15.0, None]
    fence.admit("s", 1, 0, now=13.5, coordinator="b")
    with pytest.raises(LeaseLost):
        fence.admit("s", 1, 0, now=13.5, coordinator="a")
    assert [fence.lease_lost(13.5, name) for name in ("a", "b", "", "c")] == [True, False, False, False]
    assert [fence.lease_lost(15.0, name) for name in ("a", "b", "", "c")] == [True, True, True, True]
    fence.forget_lease("a")  # a new instance serves there
    fence.renew_lease(asked_at=16.0, lease_seconds=3.0, coordinator="a2")
    assert not fence.lease_lost(17.0, "a")


async def test_only_the_turns_of_a_coordinator_that_is_not_heard_are_stopped() -> None:
    fence, stopped = Fence(), []
    turns = [SimpleNamespace(run_id=number, coordinator=name) for number, name in enumerate(("a", "b", "", "a"))]
    engine = SimpleNamespace(send=stopped.append)
    state: Any = SimpleNamespace(
        config=SimpleNamespace(coordinators=()), fence=fence, running_turns=lambda: turns,
        ready=lambda: SimpleNamespace(engine=engine),
    )  # fmt: skip
    fence.renew_lease(time.monotonic(), 0.05, "a")
    fence.renew_lease(time.monotonic(), 60.0, "b")
    watching = asyncio.create_task(Memberships(state, "host:1")._watch_leases())
    async with asyncio.timeout(20):
        while len(stopped) < 2:  # noqa: ASYNC110 - the watcher knows nothing of the test
            await asyncio.sleep(0.01)
    watching.cancel()
    assert {command.run_id for command in stopped} == {0, 3}
    assert all(isinstance(command.error, LeaseLost) for command in stopped)
