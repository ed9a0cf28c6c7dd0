"""One budget for all folders of a store: models', tenants', and of however many nodes save there at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvferry.store import names
from kvferry.store.directory import StoreDirectory
from kvferry.store.errors import StoreFull
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.pins import Pins
from kvferry.store.seals import KeyedSeal
from kvferry.store.snapshot_store import SnapshotStore

N = 40
GEOMETRY = KvGeometry(2, 2, 16)
SAVER = Path(__file__).with_name("save_many.py")


def open_tenant(
    root: Path, tenant: str, max_bytes: int = 1 << 30, node_id: str = "node-1", pins: Pins | None = None
) -> SnapshotStore:
    return SnapshotStore(
        root, "feed", GEOMETRY, 1 << 16, max_bytes, 1000, node_id, version=3, tenant=tenant, pins=pins,
        seal=KeyedSeal(bytes(32)),
    )  # fmt: skip


def save(store: SnapshotStore, first: int, n: int = N, used_at_s: int | None = None) -> str:
    rows = MemoryRows.empty(GEOMETRY, n)
    rows.k[:] = first
    rows.v[:] = -first
    name = store.publish(np.arange(first, first + n), rows).name
    if used_at_s is not None:
        os.utime(store.path / name, (used_at_s, used_at_s))
    return name


def files(store: SnapshotStore) -> set[str]:
    return {path.name for path in store.path.glob("*.kv")}


def n_bytes_of(root: Path) -> int:
    """What the files in a folder take; one with two names counts once."""
    found = {status.st_ino: status.st_size for path in root.rglob("*.*") if (status := path.lstat()).st_size}
    return sum(found.values())


def test_a_tenant_without_anything_makes_room_from_what_is_cold_of_others_chains_from_their_ends(
    tmp_path: Path,
) -> None:
    acme = open_tenant(tmp_path, "acme")
    chain = [save(acme, 0, n) for n in (N, 2 * N, 3 * N)]
    for used_at_s, name in enumerate(chain, 100):  # the first one least recently
        os.utime(acme.path / name, (used_at_s, used_at_s))
    recent = save(acme, 5000)
    bolt = open_tenant(tmp_path, "bolt", n_bytes_of(tmp_path), node_id="node-2")
    save(bolt, 0)
    assert files(acme) == {*chain[:2], recent}
    save(bolt, 1000)
    assert files(acme) == {chain[0], recent}
    assert len(files(bolt)) == 2
    assert open_tenant(tmp_path, "acme").refresh().n_known == 2  # nothing was left without what comes before it


def test_what_another_node_continued_unheard_goes_before_what_it_continues(tmp_path: Path) -> None:
    first = open_tenant(tmp_path, "")
    names = [save(first, 0, used_at_s=100)]
    second = open_tenant(tmp_path, "", node_id="node-2")
    second.refresh()
    names.append(save(second, 0, 2 * N, used_at_s=100))
    os.utime(first.path / names[0], (50, 50))
    tight = open_tenant(tmp_path, "", n_bytes_of(tmp_path), node_id="node-3")  # it has not looked
    newest = save(tight, 5000)
    assert files(tight) == {names[0], newest}


def test_what_one_tenants_turn_waits_for_is_not_evicted_for_another_tenant_of_the_same_node(tmp_path: Path) -> None:
    pins = Pins()
    acme = open_tenant(tmp_path, "acme", pins=pins)
    waited_for, _ = (save(acme, first, used_at_s=100 + first) for first in (0, 1000))
    bolt = open_tenant(tmp_path, "bolt", n_bytes_of(tmp_path), pins=pins)
    with acme.pin(waited_for):
        saved = save(bolt, 0)
        assert files(acme) == {waited_for}
        with bolt.pin(saved), pytest.raises(StoreFull, match="in use"):
            save(bolt, 1000)
        assert (files(acme), files(bolt)) == ({waited_for}, {saved})
    save(bolt, 1000)
    assert files(acme) == set()


def hold(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Stop them all; a call in the kernel ends first, however long the disk takes for it."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not all(is_still(process.pid) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def is_still(pid: int) -> bool:
    """Stopped, or gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "TtZX"


N_MEASURED, N_SAVED = 100, 40


def test_three_processes_that_save_into_one_store_keep_its_budget_at_every_moment(tmp_path: Path) -> None:
    """All are stopped while it is measured, so that what is measured was so at one moment."""
    root, stop = tmp_path / "store", tmp_path / "stop"
    probe = open_tenant(root, "probe")
    save(probe, 0)
    budget = 20 * n_bytes_of(root)
    (probe.path / next(iter(files(probe)))).unlink()
    savers = [
        subprocess.Popen(
            [sys.executable, SAVER, root, tenant, f"node-{number}", str(budget), str(N_SAVED), stop],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, tenant in enumerate(("", "acme", "bolt"))
    ]
    measured: list[int] = []
    while any(saver.poll() is None for saver in savers):
        hold(savers)
        if n_bytes := n_bytes_of(root):  # they have begun
            measured.append(n_bytes)
        if len(measured) == N_MEASURED:
            stop.touch()
        for saver in savers:
            saver.send_signal(signal.SIGCONT)
        time.sleep(0.015)
    told = [json.loads(saver.communicate(timeout=60)[0]) for saver in savers]
    assert [saver.returncode for saver in savers] == [0, 0, 0]
    assert len(measured) >= N_MEASURED
    assert max(measured) <= budget, (max(measured), budget)
    assert max(measured) > budget // 2
    for one in told:
        assert one["n_saved"] >= N_SAVED, told
        assert one["n_lost"] == one["n_wrong"] == 0, told  # of what it reads again and again
        assert one["n_without_room"] == 0, told
    assert sum(one["n_evicted"] for one in told) >= 30


class PublishingMeanwhile(PosixFileSystem):
    """Another writer's file gets its final name before one call of ours, and loses its temporary one before another."""

    def __init__(self, temp: Path, final: Path, link_before: int, unlink_before: int) -> None:
        self._temp, self._final = temp, final
        self._link_before, self._unlink_before = link_before, unlink_before
        self.n_calls = 0

    def _step(self) -> None:
        if self.n_calls == self._link_before:
            os.link(self._temp, self._final)
        if self.n_calls == self._unlink_before:
            self._temp.unlink()
        self.n_calls += 1

    def names(self, directory: str) -> list[str]:
        """A listing passes by the final name first, so that it sees the file under neither when both change then."""
        self._step()
        before = set(super().names(directory))
        self._step()
        return [name for name in super().names(directory) if name in before]

    def lstat(self, path: str) -> os.stat_result:
        self._step()
        return super().lstat(path)


def test_a_file_that_is_published_while_the_store_is_surveyed_counts_whenever_that_happens(tmp_path: Path) -> None:
    def survey(link_before: int, unlink_before: int) -> tuple[int, PublishingMeanwhile]:
        root = tmp_path / f"{link_before}-{unlink_before}"
        final = (store := open_tenant(root, "")).path / save(store, 0)
        temp = final.with_name(names.temp_name(final.name, "node-1", "0" * 32, final.stat().st_size))
        final.rename(temp)
        fs = PublishingMeanwhile(temp, final, link_before, unlink_before)
        directory = StoreDirectory(fs, root, "feed", "node-2", lambda: "0" * 32)
        n_bytes = directory.survey(time.time_ns()).n_bytes
        return n_bytes, fs

    size, untouched = survey(-1, -1)
    assert size > 0
    escaped = [
        (link, unlink)
        for link in range(untouched.n_calls + 1)
        for unlink in range(link, untouched.n_calls + 2)
        if survey(link, unlink)[0] < size
    ]
    assert not escaped


def test_damaged_files_that_wait_for_a_person_give_way_before_a_save_does(tmp_path: Path) -> None:
    acme = open_tenant(tmp_path, "acme")
    damaged, good = save(acme, 0), save(acme, 1000, used_at_s=100)
    StoreDirectory(PosixFileSystem(), tmp_path, acme.path.name, "node-1", lambda: "0" * 32).quarantine(damaged)
    bolt = open_tenant(tmp_path, "bolt", n_bytes_of(tmp_path))
    first = save(bolt, 0)
    assert (files(acme), files(bolt)) == (set(), {first})
    assert len(list((acme.path / "quarantine").iterdir())) == 1  # while anything else can go
    with bolt.pin(first):
        second = save(bolt, 1000)
    assert files(bolt) == {first, second}
    assert not list((acme.path / "quarantine").iterdir())
    assert good not in files(acme)
