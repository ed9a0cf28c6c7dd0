"""What goes with a conversation, and what stays because something else needs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.store.directory import StoreDirectory
from kvferry.store.errors import StoreUnavailable
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore
from kvferry.store.vlkv import file_bytes
from kvferry.store.vlkv3 import ContentSpan

GEOMETRY = KvGeometry(2, 2, 8)
IDS = np.arange(1, 201, dtype=np.int32)
FORK = np.concatenate([IDS[:50], np.full(20, 900, np.int32)])
ROWS = MemoryRows.empty(GEOMETRY, 200)


def open_store(root: Path, node_id: str = "node-1", version=3, **options) -> SnapshotStore:
    store = SnapshotStore(root, "feed", GEOMETRY, 1024, 1 << 30, 100, node_id, version=version, **options)
    store.refresh()
    return store


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """Three turns; the segments hold 0-79, 80-129, 130-199."""
    store = open_store(tmp_path)
    for n in (80, 130, 200):
        store.publish(IDS[:n], ROWS)
    return store


def starts(store: SnapshotStore) -> list[int]:
    """Where the segments that are there begin."""
    store.refresh()
    return sorted(int.from_bytes(path.read_bytes()[44:48], "little") for path in store.path.glob("kv3_*"))


def test_a_conversation_alone_takes_all_its_segments_with_it(store: SnapshotStore) -> None:
    assert len(store.remove(IDS)) == 3
    assert store.find(IDS) is None
    assert not list(store.path.glob("kv3_*"))


def test_what_a_fork_continues_stays_until_the_fork_goes_too(store: SnapshotStore) -> None:
    store.publish(FORK, ROWS)
    assert len(store.remove(IDS)) == 2
    assert starts(store) == [0, 50]
    assert store.find(FORK).n_common == 70
    assert len(store.remove(FORK)) == 1
    assert starts(store) == [0]  # rows 50 to 79 are the first one's: nobody alive has those tokens
    assert len(store.remove(IDS)) == 1


def test_what_is_continued_while_it_goes_stays(store: SnapshotStore, tmp_path: Path, monkeypatch) -> None:
    delete = StoreDirectory.delete_unless

    def delete_while_another_saves(directory: StoreDirectory, *what: Any) -> bool:
        is_gone = delete(directory, *what)
        open_store(tmp_path, "node-2").publish(np.concatenate([IDS[:130], np.full(20, 901, np.int32)]), ROWS)
        return is_gone

    monkeypatch.setattr(StoreDirectory, "delete_unless", delete_while_another_saves)
    assert len(store.remove(IDS)) == 1
    assert starts(store) == [0, 80, 130]
    assert store.statistics().n_orphans == 0


def test_what_is_continued_as_it_goes_gets_its_name_back(store: SnapshotStore, tmp_path: Path, monkeypatch) -> None:
    take = StoreDirectory._move_to_trash

    def take_after_another_saves(directory: StoreDirectory, *what: Any) -> bool:
        longer = np.concatenate([IDS, np.full(20, 901, np.int32)])
        open_store(tmp_path, "node-2").publish(longer, MemoryRows.empty(GEOMETRY, 220))
        return take(directory, *what)

    monkeypatch.setattr(StoreDirectory, "_move_to_trash", take_after_another_saves)
    assert store.remove(IDS) == ()
    assert starts(store) == [0, 80, 130, 200]
    assert store.statistics().n_orphans == 0


@pytest.fixture
def directory(store: SnapshotStore) -> StoreDirectory:
    return store._directory


@pytest.fixture
def victim(store: SnapshotStore) -> str:
    return store.find(IDS).name


def test_what_was_saved_anew_while_it_was_away_stays_as_it_is(directory: StoreDirectory, victim: str) -> None:
    data = directory.file(victim).read_bytes()

    def is_saved_anew(_: object) -> bool:
        assert not directory.file(victim).exists()
        directory.file(victim).write_bytes(data)
        os.utime(directory.file(victim), (7, 7))
        return True

    assert not directory.delete_unless(victim, is_saved_anew)
    assert directory.file(victim).stat().st_mtime == 7
    assert not list((directory.path / "trash").iterdir())


def test_a_look_that_fails_leaves_the_file_as_it_was(directory: StoreDirectory, victim: str) -> None:
    before = directory.identity(victim)

    def fail(_: object) -> bool:
        raise StoreUnavailable("the store hangs", op="list", path=directory.path)

    with pytest.raises(StoreUnavailable, match="hangs"):
        directory.delete_unless(victim, fail)
    assert directory.identity(victim) == before
    assert directory.delete_unless("kv3_" + "0" * 32 + ".kv", fail)  # gone already: nothing to look for


@pytest.mark.parametrize(("n_shared", "left"), [(0, []), (1, [0]), (80, [0]), (81, [0, 80]), (200, [0, 80, 130])])
def test_what_a_living_conversation_shares_stays(store: SnapshotStore, n_shared: int, left: list[int]) -> None:
    """A fork that has saved nothing yet hangs on no segment; the coordinator knows of it."""
    store.remove(IDS, n_shared=n_shared)
    assert starts(store) == left


def test_nothing_of_another_conversation_goes(store: SnapshotStore) -> None:
    for other in (IDS[1:], IDS[:79], np.append(IDS[:79], 5)):
        assert store.remove(other) == ()
    assert starts(store) == [0, 80, 130]


def test_a_branch_that_was_given_up_goes_only_by_its_own_tokens(store: SnapshotStore) -> None:
    """An answer that was drawn again: its rows are no prefix of the conversation's tokens any more."""
    again = np.append(IDS[:130], np.full(10, 7, np.int32))
    store.publish(again, ROWS)
    store.remove(IDS)
    assert starts(store) == [0, 80, 130]
    store.remove(again)
    assert starts(store) == []


def test_the_same_words_about_another_picture_are_another_conversations(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    cat, dog = (ContentSpan(10, 5, bytes([n]) * 32) for n in (1, 2))
    store.publish(IDS[:60], ROWS, spans=[cat])
    assert store.remove(IDS[:60], [dog]) == ()
    assert store.remove(IDS[:60]) == ()
    assert len(store.remove(IDS[:60], [cat])) == 1


def test_what_is_pinned_stays_with_all_that_it_hangs_on(store: SnapshotStore) -> None:
    match = store.find(IDS[:130])
    with store.pin(match.name):
        store.remove(IDS)
    assert starts(store) == ([0, 80] if match.n_tokens == 130 else [0, 80, 130])


def test_what_another_node_continued_meanwhile_stays(store: SnapshotStore, tmp_path: Path) -> None:
    open_store(tmp_path, "node-2").publish(np.append(IDS, 5), MemoryRows.empty(GEOMETRY, 201))
    assert store.remove(IDS) == ()


def test_merged_segments_and_the_ones_they_stand_for_go_together(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for n in range(40, 201, 2):
        store.publish(IDS[:n], ROWS)
    assert store.compact()
    assert store.remove(IDS)
    assert not list(store.path.glob("kv3_*"))


def test_whole_files_go_as_far_as_they_are_its_own(tmp_path: Path) -> None:
    store = open_store(tmp_path, version=1)
    for n in (40, 80, 130):
        store.publish(IDS[:n], ROWS)
    store.publish(FORK, ROWS)
    assert len(store.remove(IDS, n_shared=50)) == 2
    assert sorted(path.stat().st_size for path in store.path.glob("kv_*")) == [
        file_bytes(GEOMETRY, n) for n in (40, 70)
    ]
