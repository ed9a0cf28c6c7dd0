"""The store's index for routing: it may be old, it may be empty, and it never makes anybody wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvferry.coordinator import snapshots
from kvferry.coordinator.snapshots import MAX_TENANTS, MAX_WAITING_JOBS, SnapshotView
from kvferry.store.errors import StoreUnavailable
from kvferry.store.geometry import KvGeometry
from kvferry.store.place import StorePlace
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(n_layers=1, n_kv_heads=1, head_dim=2)
FINGERPRINT, VOCABULARY = "a" * 32, 1000


class Zeros:
    def read_rows(self, layer: int, start: int, stop: int, k_out: Any, v_out: Any) -> None:
        k_out[:], v_out[:] = 0, 0


def publish(root: Path, n_tokens: int, tenant: str = "") -> str:
    store = SnapshotStore(root, FINGERPRINT, GEOMETRY, VOCABULARY, 1 << 20, 100, "n", tenant=tenant)
    store.reap()
    return store.publish(np.arange(n_tokens, dtype=np.int32), Zeros()).name


def drained(view: SnapshotView) -> None:
    """Until the thread has done what was asked of it so far."""
    done = threading.Event()
    view._submit(done.set)
    assert done.wait(20)


def test_what_is_there_at_the_start_is_found(view: SnapshotView, tmp_path: Path) -> None:
    publish(tmp_path, 40)
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    assert view.longest_prefixes(range(100)) == {FINGERPRINT: 40}
    assert view.n_snapshots == 1
    assert view.n_bytes == 64 + 40 * 4 + 40 * 16


def test_what_is_announced_is_found(view: SnapshotView, tmp_path: Path) -> None:
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    view.announce(FINGERPRINT, [publish(tmp_path, 40)])
    view.announce("b" * 32, ["kv_0000000000000000.kv"])
    view.announce(FINGERPRINT, ["kv_0000000000000000.kv", "../../etc/passwd"])
    drained(view)
    assert view.longest_prefixes(range(100)) == {FINGERPRINT: 40}
    assert (view.n_snapshots, view.n_bytes) == (1, 64 + 40 * 4 + 40 * 16)


def test_a_tenants_snapshots_are_found_for_its_turns_only(view: SnapshotView, tmp_path: Path) -> None:
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    publish(tmp_path, 40, "acme")
    view.longest_prefixes(range(100), namespace="acme")  # the first turn makes the thread look
    drained(view)
    assert view.longest_prefixes(range(100), namespace="acme") == {FINGERPRINT: 40}
    view.announce(FINGERPRINT, [publish(tmp_path, 60, "bolt")], "bolt")
    drained(view)
    found = {who: view.longest_prefixes(range(100), namespace=who) for who in ("acme", "bolt", "corp", "")}
    assert found == {"acme": {FINGERPRINT: 40}, "bolt": {FINGERPRINT: 60}, "corp": {}, "": {}}


def test_only_the_latest_tenants_are_kept_in_memory(view: SnapshotView, tmp_path: Path) -> None:
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    for number in range(2 * MAX_TENANTS):
        view.longest_prefixes(range(100), namespace=f"t{number}")
    assert len(view._stores) == MAX_TENANTS + 1
    publish(tmp_path, 40)
    view._submit(lambda: view._refresh((FINGERPRINT, ""), view._stores[FINGERPRINT, ""]))
    drained(view)
    assert view.longest_prefixes(range(100)) == {FINGERPRINT: 40}


def test_a_refused_file_counts_neither_in_number_nor_in_bytes(view: SnapshotView, tmp_path: Path) -> None:
    damaged = tmp_path / FINGERPRINT / publish(tmp_path, 40)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    assert (view.n_snapshots, view.n_bytes) == (0, 0)


def test_the_last_token_of_a_request_is_of_no_use(view: SnapshotView, tmp_path: Path) -> None:
    publish(tmp_path, 40)
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    assert view.longest_prefixes(range(40)) == {FINGERPRINT: 39}


def test_without_a_store_nothing_is_found_and_nothing_runs() -> None:
    view = SnapshotView(None)
    view.start()
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    assert view.longest_prefixes(range(40)) == {}
    view.stop()


def test_a_store_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    view = SnapshotView(StorePlace(str(tmp_path / "nowhere")))
    view.start()
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    assert view.longest_prefixes(range(40)) == {}
    view.stop()


def test_a_store_that_hangs_makes_nobody_wait(view: SnapshotView, tmp_path: Path) -> None:
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    name = publish(tmp_path, 40)
    view.announce(FINGERPRINT, [name])
    drained(view)
    hangs, release = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(20)

    view._submit(hang)
    assert hangs.wait(20)
    for _ in range(2 * MAX_WAITING_JOBS):
        view.announce(FINGERPRINT, [name])
    assert view.longest_prefixes(range(100)) == {FINGERPRINT: 40}
    release.set()


def test_what_was_evicted_is_noticed_however_much_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "REFRESH_SECONDS", 0.2)
    evicted = tmp_path / FINGERPRINT / publish(tmp_path, 40)
    view = SnapshotView(StorePlace(str(tmp_path)))
    view.start()
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    evicted.unlink()
    give_up_s = time.monotonic() + 5
    while view.longest_prefixes(range(100)) and time.monotonic() < give_up_s:
        view.announce(FINGERPRINT, ["kv_0000000000000000.kv"])
        time.sleep(0.01)
    assert view.longest_prefixes(range(100)) == {}
    view.stop()


def test_a_store_is_identified_though_it_could_not_be_asked_at_first(tmp_path: Path) -> None:
    view = SnapshotView(StorePlace(str(tmp_path)))
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    for _ in range(MAX_WAITING_JOBS):  # it hangs
        view.announce(FINGERPRINT, ["kv_0000000000000000.kv"])
    assert view.which_store().store_id == ""
    (tmp_path / "store-id").write_text("c" * 32)
    view.start()
    give_up_s = time.monotonic() + 5
    while not view.which_store().store_id and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert view.which_store().store_id == "c" * 32
    view.stop()


def test_a_store_that_fails_between_two_looks_at_a_file_is_looked_at_again(
    view: SnapshotView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view.watch(FINGERPRINT, GEOMETRY, VOCABULARY)
    drained(view)
    with monkeypatch.context() as broken:
        away = StoreUnavailable("it does not answer", op="look at", path=tmp_path)
        broken.setattr(SnapshotStore, "file", Mock(side_effect=away))
        view.announce(FINGERPRINT, [publish(tmp_path, 40)])
        drained(view)
    view.announce(FINGERPRINT, [publish(tmp_path, 60)])
    drained(view)
    assert view.longest_prefixes(range(100)) == {FINGERPRINT: 60}
