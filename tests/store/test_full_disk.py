"""Promise 8: a full disk fails no save for good."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Literal

import pytest

from kvferry.store.errors import StoreFull
from kvferry.store.faults import Fault, FaultyFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows

from .numbered import bytes_in, ids_of, names_in, save_number


def test_injected_enospc_on_the_first_write_evicts_and_the_second_try_succeeds(make_store) -> None:
    fs = FaultyFileSystem()
    store = make_store(fs=fs)
    first = save_number(store, 0, used_at_s=1)
    fs.faults.append(Fault("writev", errno.ENOSPC, times=1))
    second = save_number(store, 1)
    assert names_in(store) == {second}
    assert first not in names_in(store)


@pytest.mark.parametrize(
    "budget_bytes", [48 << 20, 1 << 40], ids=["within-the-budget", "a-budget-larger-than-the-disk"]
)
@pytest.mark.parametrize("version", [1, 3])
def test_200_sessions_on_a_small_disk_are_all_saved(
    small_disk: Path, make_store, budget_bytes: int, version: Literal[1, 3]
) -> None:
    """Promise 8: every save succeeds, and after each not one byte is over the budget."""
    geometry = KvGeometry(8, 2, 64)
    store = make_store(root=small_disk, geometry=geometry, max_bytes=budget_bytes, version=version)
    store.reap()
    choices = random.Random(8)
    for number in range(200):
        n = choices.randrange(1, 250)
        rows = MemoryRows.empty(geometry, n)
        rows.k[:] = rows.v[:] = number
        store.publish(ids_of(number, n), rows)
        assert bytes_in(store.path) <= budget_bytes
        match = store.find(ids_of(number, n), min_tokens=1)
        back = MemoryRows.empty(geometry, n)
        store.restore(match, n, back)
        assert (back.k == number).all()
    assert store.statistics().n_evicted > 0
    assert store.statistics().n_failed_saves == 0


def test_a_disk_full_of_other_peoples_files_is_said_and_nothing_is_left(small_disk: Path, make_store) -> None:
    geometry = KvGeometry(4, 2, 64)
    store = make_store(root=small_disk, geometry=geometry)
    store.reap()
    (small_disk / "theirs").write_bytes(bytes((64 << 20) - (64 << 10)))
    with pytest.raises(StoreFull, match=r"its disk has \d+ bytes free, \d+ are needed") as caught:
        store.publish(ids_of(0, 200), MemoryRows.empty(geometry, 200))
    n_free, n_needed = (int(word) for word in str(caught.value).split() if word.isdigit())
    assert n_free <= 64 << 10 < n_needed == caught.value.needed_bytes
    assert "in use" not in str(caught.value)  # that would blame the store's own budget, which has room
    assert [path.name for path in store.path.iterdir()] == ["trash"]
