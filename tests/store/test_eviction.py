"""Promises 8 and 9: the budget holds, and what is being read is never taken away."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from kvferry.store import vlkv
from kvferry.store.errors import SnapshotGone, StoreFull, StoreMisuse
from kvferry.store.faults import FaultyFileSystem
from kvferry.store.fs import PosixFileSystem
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

from .no_sync import NoSync
from .numbered import N, bytes_in, ids_of, names_in, save_number


def test_the_least_recently_used_goes_first_by_count(make_store) -> None:
    store = make_store(max_files=3)
    names = [save_number(store, number, used_at_s=100 + number) for number in range(3)]
    os.utime(store.path / names[0], (500, 500))
    newest = save_number(store, 3)
    assert names_in(store) == {names[0], names[2], newest}
    assert names[1] not in {match.name for match in [store.find(ids_of(1))] if match}


def test_a_restore_counts_as_use(make_store) -> None:
    store = make_store(max_files=2)
    names = [save_number(store, number, used_at_s=100 + number) for number in range(2)]
    store.restore(store.find(ids_of(0)), N, MemoryRows.empty(store.geometry, N))
    save_number(store, 2)
    assert names[0] in names_in(store)
    assert names[1] not in names_in(store)


def test_the_budget_in_bytes_is_never_exceeded_trash_and_temps_included(make_store, tiny) -> None:
    n_bytes = vlkv.file_bytes(tiny, N)
    highest = 0
    store = None

    def measure(call: str) -> None:
        nonlocal highest
        if store is not None and store.path.exists() and call != "link":
            highest = max(highest, bytes_in(store.path))

    store = make_store(max_bytes=3 * n_bytes + 10, fs=FaultyFileSystem(on_call=measure))
    for number in range(12):
        save_number(store, number)
    assert len(names_in(store)) == 3
    assert highest <= 3 * n_bytes + 10 + n_bytes  # between link and unlink one file has two names
    assert bytes_in(store.path) <= 3 * n_bytes + 10


def test_two_writers_see_each_others_reservations(make_store, tiny) -> None:
    """Both want the last free place: together they still keep to the budget."""
    n_bytes = vlkv.file_bytes(tiny, N)
    other = make_store("node-2", max_bytes=2 * n_bytes)
    outcomes: list[str] = []

    def interrupt(call: str) -> None:
        if call == "writev" and not outcomes:
            outcomes.append("started")
            save_number(other, 2)
            outcomes.append("published")

    store = make_store(max_bytes=2 * n_bytes, fs=FaultyFileSystem(on_call=interrupt))
    first = make_store("node-3", max_bytes=2 * n_bytes)
    save_number(first, 0, used_at_s=1)
    save_number(store, 1)
    assert outcomes == ["started", "published"]
    assert names_in(store) == {vlkv.file_name(vlkv.fnv1a(ids_of(number))) for number in (1, 2)}


def test_a_snapshot_larger_than_the_whole_budget_is_refused_before_anything_goes(make_store, tiny) -> None:
    store = make_store(max_bytes=vlkv.file_bytes(tiny, N))
    kept = save_number(store, 0)
    with pytest.raises(StoreFull, match="whole budget"):
        store.publish(ids_of(1, N + 1), MemoryRows.empty(tiny, N + 1))
    assert names_in(store) == {kept}


def test_an_evicted_file_stays_in_the_trash_for_its_grace_period(make_store) -> None:
    store = make_store(max_files=1)
    first = save_number(store, 0)
    save_number(store, 1)
    trashed = list((store.path / "trash").iterdir())
    assert [path.name[: len(first)] for path in trashed] == [first]
    make_store(max_files=1, trash_grace_s=0).evict()
    assert not list((store.path / "trash").iterdir())


def test_a_lowered_budget_is_enforced_by_evict(make_store) -> None:
    store = make_store()
    names = [save_number(store, number, used_at_s=100 + number) for number in range(5)]
    assert make_store(max_files=2).evict() == tuple(names[:3])
    assert names_in(store) == set(names[3:])


def test_what_is_pinned_stays_and_the_save_gives_way(make_store) -> None:
    store = make_store(max_files=1)
    kept = save_number(store, 0)
    with store.pin(kept):
        with pytest.raises(StoreFull, match="in use"):
            save_number(store, 1)
        assert names_in(store) == {kept}
    save_number(store, 1)
    assert kept not in names_in(store)


def test_what_is_pinned_after_the_victims_were_chosen_stays_too(make_store) -> None:
    pins = contextlib.ExitStack()
    oldest = ""

    def pin_while_the_directory_is_looked_at(call: str) -> None:
        nonlocal oldest
        if oldest and call == "names":
            pins.enter_context(store.pin(oldest))
            oldest = ""

    store = make_store(max_files=2, fs=FaultyFileSystem(on_call=pin_while_the_directory_is_looked_at))
    kept, gone = (save_number(store, number, used_at_s=100 + number) for number in range(2))
    oldest = kept
    newest = save_number(store, 2)
    assert not oldest
    assert names_in(store) == {kept, newest}
    assert gone not in names_in(store)
    pins.close()


def test_what_is_being_evicted_cannot_be_pinned_any_more(make_store) -> None:
    refused: list[str] = []

    def pin_the_victim(call: str) -> None:
        if call == "rename":
            with pytest.raises(SnapshotGone), store.pin(victim):
                pass
            refused.append(victim)

    store = make_store(max_files=1, fs=FaultyFileSystem(on_call=pin_the_victim))
    victim = save_number(store, 0)
    save_number(store, 1)
    assert refused == [victim]


def test_a_file_evicted_while_another_process_reads_it_is_read_to_its_end(make_store, tiny) -> None:
    """Deletion takes the name; an open file keeps its bytes."""
    writer = make_store(max_files=1, max_bytes=vlkv.file_bytes(tiny, N) + 10)
    save_number(writer, 7)
    n_reads = 0

    def evict_meanwhile(call: str) -> None:
        nonlocal n_reads
        n_reads += call == "preadv"
        if n_reads == 4 and call == "preadv":
            save_number(writer, 8)

    reader = make_store("node-2", fs=FaultyFileSystem(on_call=evict_meanwhile))
    reader.refresh()
    n_reads = 0
    rows = MemoryRows.empty(tiny, N)
    reader.restore(reader.find(ids_of(7)), N, rows)
    assert (rows.k == 7).all()
    assert (rows.v == -7).all()


def test_a_vanished_file_is_a_miss_and_not_offered_again(make_store, tiny) -> None:
    store = make_store()
    name = save_number(store, 0)
    match = store.find(ids_of(0))
    (store.path / name).unlink()
    with pytest.raises(SnapshotGone, match="recomputed"):
        store.restore(match, N, MemoryRows.empty(tiny, N))
    assert store.find(ids_of(0)) is None


def test_2000_random_interleavings_of_read_pin_and_evict_lose_no_read(make_store, tiny) -> None:
    """Promise 9. In the middle of a read (between any two calls of it) the same process evicts down to one file."""
    choices = random.Random(9)
    strike_at = -1
    evictor = None

    def maybe_evict(call: str) -> None:
        nonlocal strike_at
        if evictor is None or call not in {"open_read", "fstat", "preadv", "close", "touch"}:
            return
        strike_at -= 1
        if strike_at == 0:
            evictor()

    store = make_store(max_files=4, trash_grace_s=0, fs=FaultyFileSystem(inner=NoSync(), on_call=maybe_evict))
    for number in range(4):
        save_number(store, number)
    n_evicted = 0

    def evict() -> None:
        nonlocal evictor, n_evicted
        evictor = None
        n_evicted += 1
        try:
            save_number(store, choices.randrange(4, 12))
        except StoreFull:
            pytest.fail("three files could go")

    for _ in range(2000):
        number = choices.randrange(12)
        match = store.find(ids_of(number), min_tokens=N)
        if match is None:
            save_number(store, number)
            match = store.find(ids_of(number), min_tokens=N)
        n_rows = choices.randrange(1, N + 1)
        rows = MemoryRows.empty(tiny, n_rows)
        strike_at, evictor = choices.randrange(1, 12), evict
        store.restore(match, n_rows, rows)
        evictor = None
        assert (rows.k == number).all()
        assert (rows.v == -number).all()
    assert n_evicted > 500
    assert store.statistics().n_failed_restores == 0


def test_threads_that_read_pin_and_publish_at_once_lose_nothing(make_store, tiny) -> None:
    store = make_store(max_files=6)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        choices = random.Random(seed)
        try:
            for _ in range(150):
                number = choices.randrange(20)
                match = store.find(ids_of(number), min_tokens=N)
                if match is None:
                    save_number(store, number)
                    continue
                rows = MemoryRows.empty(tiny, N)
                try:
                    store.restore(match, N, rows)
                except SnapshotGone:
                    continue
                assert (rows.k == number).all()
        except BaseException as failure:  # noqa: BLE001 -- carried over to the test's thread
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(names_in(store)) <= 6
    assert not list(store.path.glob("*.tmp"))


def test_a_read_only_store_never_writes(make_store, tmp_path: Path, tiny) -> None:
    writer = make_store()
    name = save_number(writer, 0, used_at_s=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    index = SnapshotStore.index_only(tmp_path, writer.path.name, tiny, 1024)
    index.refresh()
    assert index.find(ids_of(0)).name == name
    index.restore(index.find(ids_of(0)), N, MemoryRows.empty(tiny, N))
    for forbidden in (index.reap, index.evict, lambda: save_number(index, 1)):
        with pytest.raises(StoreMisuse):
            forbidden()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    missing = SnapshotStore.index_only(tmp_path / "nowhere", "feed", tiny, 1024)
    assert missing.refresh().n_known == 0
    assert not (tmp_path / "nowhere").exists()


def test_the_budget_is_the_whole_stores_whatever_model_the_bytes_are_of(make_store, tiny) -> None:
    n_bytes = vlkv.file_bytes(tiny, N)
    left_over = make_store("node-1", fingerprint="feed", max_bytes=1 << 30)
    of_old_build = [save_number(left_over, number, used_at_s=100 + number) for number in range(3)]
    store = make_store(max_bytes=3 * n_bytes)
    mine = [save_number(store, number) for number in range(2)]
    assert names_in(store) == set(mine)
    assert names_in(left_over) == {of_old_build[2]}
    assert bytes_in(store.path.parent) <= 3 * n_bytes


def test_a_neighbours_trash_goes_before_anything_in_use(make_store, tiny) -> None:
    n_bytes = vlkv.file_bytes(tiny, N)
    neighbour = make_store("node-1", fingerprint="feed", max_files=1)
    save_number(neighbour, 0)
    kept = save_number(neighbour, 1)  # the first is in the trash now
    store = make_store(max_bytes=2 * n_bytes)
    mine = save_number(store, 0)
    assert (names_in(store), names_in(neighbour)) == ({mine}, {kept})
    assert not list((neighbour.path / "trash").iterdir())


def test_what_else_lies_in_the_root_is_nobodys_to_count_or_to_remove(make_store, tiny, tmp_path: Path) -> None:
    for name in ("lost+found", "Backups", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(1 << 20))
    store = make_store(max_bytes=vlkv.file_bytes(tiny, N))
    mine = save_number(store, 0)
    assert names_in(store) == {mine}
    assert all((tmp_path / name / "file").exists() for name in ("lost+found", "Backups", "notes"))


class ReadHook(PosixFileSystem):
    """Does something else in the middle of the first read."""

    def __init__(self) -> None:
        self.meanwhile = lambda: None

    def preadv(self, fd, buffers, offset) -> int:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("version", [1, 3])
def test_another_node_does_not_evict_what_is_being_read_while_anything_else_will_do(make_store, version) -> None:
    writer = make_store("node-1", max_files=3, version=version)
    names = [save_number(writer, number, used_at_s=100 + number) for number in (0, 100, 200)]
    hook = ReadHook()
    reader = make_store("node-2", max_files=3, version=version, fs=hook)
    reader.refresh()
    hook.meanwhile = lambda: save_number(writer, 300)
    match = reader.find(ids_of(0))
    assert match is not None
    rows = MemoryRows.empty(reader.geometry, N)
    reader.restore(match, N, rows)
    assert rows.k.tobytes() == np.zeros_like(rows.k).tobytes()
    assert names[0] in names_in(writer)  # the least recently used until it was read
    assert names[1] not in names_in(writer)
    assert reader.find(ids_of(0)) is not None
