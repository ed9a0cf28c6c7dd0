"""Listing, announcing, remembering refusals, reaping: what a store knows of its directory, and when."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvferry.store import names
from kvferry.store.errors import SnapshotRejected, StoreMisuse, StoreUnavailable
from kvferry.store.faults import Fault, FaultyFileSystem
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

IDS = np.arange(1, 41)
DAY_S = 24 * 3600
FOREIGN = "kv_{:016x}.kv.{}.{:032x}.1000.tmp"


def test_what_another_node_publishes_is_found_after_a_refresh(make_store, make_rows, tiny) -> None:
    writer, reader = make_store("node-1"), make_store("node-2")
    assert reader.refresh().n_known == 0
    info = writer.publish(IDS, make_rows(tiny, 40))
    assert reader.find(IDS) is None
    assert reader.refresh().added == (info.name,)
    assert reader.find(IDS).name == info.name
    assert reader.refresh().added == ()


def test_what_is_announced_is_opened_by_its_name_without_a_listing(make_store, make_rows, tiny) -> None:
    fs = FaultyFileSystem(Fault("names", errno.EIO))
    writer, reader = make_store("node-1"), make_store("node-2", fs=fs)
    info = writer.publish(IDS, make_rows(tiny, 40))
    assert reader.announce(info.name)
    assert reader.find(IDS).name == info.name
    assert not reader.announce("kv_00000000000000ab.kv")


def test_a_stale_listing_does_not_make_an_announced_file_forgotten(make_store, make_rows, tiny) -> None:
    """On NFS a listing may be a minute old."""

    class StaleListing(FaultyFileSystem):
        def names(self, directory: str) -> list[str]:
            return []

    writer, reader = make_store("node-1"), make_store("node-2", fs=StaleListing())
    info = writer.publish(IDS, make_rows(tiny, 40))
    reader.announce(info.name)
    assert reader.refresh().removed == ()
    (writer.path / info.name).unlink()
    assert reader.refresh().removed == (info.name,)


def test_known_files_are_not_opened_again(make_store, make_rows, tiny) -> None:
    make_store().publish(IDS, make_rows(tiny, 40))
    fs = FaultyFileSystem()
    reader = make_store("node-2", fs=fs)
    reader.refresh()
    fs.calls.clear()
    reader.refresh()
    assert fs.calls == ["names"]


def test_a_refused_file_is_read_again_only_when_it_changed(make_store, make_rows, tiny, caplog) -> None:
    writer = make_store()
    info = writer.publish(IDS, make_rows(tiny, 40))
    good = (writer.path / info.name).read_bytes()
    (writer.path / info.name).write_bytes(good[:-1])
    fs = FaultyFileSystem()
    reader = make_store("node-2", fs=fs)
    assert reader.refresh().refused == (info.name,)
    assert reader.refused() == {info.name: "size_mismatch"}
    assert "size_mismatch" in caplog.text
    fs.calls.clear()
    caplog.clear()
    assert reader.refresh().refused == (info.name,)
    assert not reader.announce(info.name)
    assert "open_read" not in fs.calls
    assert not caplog.text
    (writer.path / info.name).write_bytes(good)
    assert reader.refresh().added == (info.name,)
    assert reader.refused() == {}


def test_a_refused_file_that_is_gone_is_no_longer_reported(make_store, make_rows, tiny) -> None:
    store = make_store()
    info = store.publish(IDS, make_rows(tiny, 40))
    path = store.path / info.name
    path.write_bytes(b"")
    reader = make_store("node-2")
    reader.refresh()
    assert reader.refused()
    path.unlink()
    reader.refresh()
    assert reader.refused() == {}


def test_what_a_reader_refused_is_not_offered_by_a_store_that_only_looks(make_store, make_rows, tiny, tmp_path) -> None:
    writer = make_store()
    info = writer.publish(IDS, make_rows(tiny, 40))
    os.utime(writer.path / info.name, (1, 1))
    index = SnapshotStore.index_only(tmp_path, writer.path.name, tiny, 1024)
    index.refresh()
    index.distrust(info.name, "token_hash_mismatch")
    index.refresh()
    assert index.find(IDS) is None
    assert index.refused() == {info.name: "token_hash_mismatch"}
    (writer.path / info.name).unlink()
    writer.publish(IDS, make_rows(tiny, 40))
    index.refresh()
    assert index.find(IDS).name == info.name


def test_one_unreadable_file_does_not_hide_the_others(make_store, make_rows, tiny) -> None:
    writer = make_store()
    for first in (1, 100, 200):
        writer.publish(np.arange(first, first + 20), make_rows(tiny, 20))
    reader = make_store("node-2", fs=FaultyFileSystem(Fault("preadv", errno.EIO, times=1)))
    report = reader.refresh()
    assert len(report.unreadable) == 1
    assert report.n_known == 2
    assert reader.refresh().n_known == 3


def test_a_directory_that_cannot_be_listed_is_unavailable(make_store) -> None:
    store = make_store(fs=FaultyFileSystem(Fault("names", errno.EIO)))
    with pytest.raises(StoreUnavailable, match="cannot list"):
        store.refresh()


def test_start_takes_own_temps_always_and_foreign_ones_after_a_day_by_the_file_systems_clock(make_store) -> None:
    store = make_store("node-1")
    store.reap()
    ages = {"own fresh": ("node-1", 0), "own old": ("node-1", 2 * DAY_S), "foreign": ("node-2", 0)}
    ages |= {"foreign 23 h": ("node-2", 23 * 3600), "foreign 25 h": ("node-2", 25 * 3600), "node-10": ("node-10", 0)}
    paths = {}
    now = (store.path / "trash").stat().st_mtime
    for number, (what, (node, age_s)) in enumerate(ages.items()):
        paths[what] = store.path / FOREIGN.format(number, node, number)
        paths[what].write_bytes(b"half")
        os.utime(paths[what], (now - age_s, now - age_s))
    others = [store.path / name for name in ("notes.txt", "kv_12.kv.tmp", "x.tmp")]
    for path in others:
        path.write_text("not ours")
    report = store.reap()
    assert (report.n_own_temps, report.n_foreign_temps) == (2, 1)
    assert {what for what, path in paths.items() if path.exists()} == {"foreign", "foreign 23 h", "node-10"}
    assert all(path.exists() for path in others)


def test_a_dead_writers_reservation_stops_counting_once_nothing_is_written_to_it(make_store, make_rows, tiny) -> None:
    store = make_store("node-1", max_bytes=20_000)
    store.reap()
    temp = store.path / names.temp_name("kv_0000000000000001.kv", "node-2", "a" * 32, 19_000)
    temp.write_bytes(b"")
    with pytest.raises(Exception, match="no room"):
        store.publish(IDS, make_rows(tiny, 40))
    os.utime(temp, (temp.stat().st_mtime - 1000,) * 2)
    store.publish(IDS, make_rows(tiny, 40))


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "a b", "A", "x" * 65, "a\x00b", "é"])
def test_a_fingerprint_that_could_leave_the_store_is_misuse(name: str, make_store) -> None:
    with pytest.raises(StoreMisuse):
        make_store(fingerprint=name)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x", "a b", "x" * 65, "a\x00b", "é"])
def test_a_node_id_that_could_leave_the_store_is_misuse(name: str, make_store) -> None:
    with pytest.raises(StoreMisuse):
        make_store(name)


def test_statistics_count_what_was_done(make_store, make_rows, tiny) -> None:
    store = make_store()
    info = store.publish(IDS, make_rows(tiny, 40))
    store.publish(IDS, make_rows(tiny, 40))
    store.restore(store.find(IDS), 30, MemoryRows.empty(tiny, 30))
    found = store.statistics()
    assert (found.n_published, found.n_already_there, found.n_restored, found.n_known) == (1, 1, 1, 1)
    assert found.bytes_written == info.n_bytes
    assert found.bytes_read == 30 * (info.n_bytes - 64) // 40


def test_restore_asks_for_no_more_than_the_common_rows(make_store, make_rows, tiny) -> None:
    store = make_store()
    store.publish(IDS, make_rows(tiny, 40))
    match = store.find(np.append(IDS[:20], 999))
    for n_rows in (0, -1, 21):
        with pytest.raises(StoreMisuse):
            store.restore(match, n_rows, MemoryRows.empty(tiny, 40))
    assert store.find(np.append(IDS[:15], 999)) is None
    assert store.find(np.append(IDS[:16], 999)) is not None


def test_untrusted_owners_are_refused_when_asked_for(make_store, make_rows, tiny, tmp_path: Path) -> None:
    store = make_store()
    info = store.publish(IDS, make_rows(tiny, 40))
    strict = SnapshotStore(
        tmp_path, store.path.name, tiny, 1024, 1, 1, "node-2", trusted_uids=frozenset({os.geteuid() + 1})
    )
    strict.refresh()
    assert strict.refused() == {info.name: "untrusted_owner"}
    with pytest.raises(SnapshotRejected, match="bad_name"):
        strict.announce("../../etc/passwd")
