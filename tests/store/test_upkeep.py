"""`kvferry kv fsck | scrub | gc | du | rm | ls | lcp | dump` on version 3 stores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from kvferry.store import vlkv3
from kvferry.store.cli import kv
from kvferry.store.commands.shared import OpenStore
from kvferry.store.directory import ReapReport, StoreDirectory
from kvferry.store.folder import Folder
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.pace import Pace
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(2, 2, 8)
IDS = np.arange(1, 201, dtype=np.int32)
K = np.random.default_rng(2).standard_normal((2, 200, 16), np.float32)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(kv, [str(argument) for argument in arguments])


def facts(*arguments: str | Path):
    return json.loads(run(*arguments, "--json").output)


def open_store(root: Path) -> SnapshotStore:
    store = SnapshotStore(root, "feed", GEOMETRY, 1024, 1 << 30, 2000, "node-1", version=3)
    store.refresh()
    return store


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """A conversation of three turns, and another one that forks off it at position 50."""
    store = open_store(tmp_path)
    for n in (80, 130, 200):
        store.publish(IDS[:n], MemoryRows(K, -K))
    store.publish(fork_ids(), MemoryRows(K, -K))
    return store


def fork_ids() -> np.ndarray:
    return np.concatenate([IDS[:50], np.full(20, 900, np.int32)])


def names(store: SnapshotStore) -> list[str]:
    """In the order of their positions: 0-79, 50-69 (the fork), 80-129, 130-199."""
    files = {path: vlkv3.parse_extent(path.read_bytes(), GEOMETRY) for path in store.path.glob("kv3_*")}
    return [path.name for path in sorted(files, key=lambda path: files[path].start)]


def damage(path: Path, layer: int, position: int) -> None:
    data = bytearray(path.read_bytes())
    extent = vlkv3.parse_extent(data, GEOMETRY)
    data[extent.block_offset(layer, position // 32)] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_a_healthy_store_is_said_to_be_so(store: SnapshotStore, tmp_path: Path) -> None:
    result = run("fsck", tmp_path)
    assert result.exit_code == 0
    assert "4 files, 0 problems" in result.output
    assert facts("fsck", tmp_path)["problems"] == []
    assert run("scrub", tmp_path).exit_code == 0
    assert len(names(store)) == 4


def test_fsck_locates_damage_and_changes_nothing_unless_asked(store: SnapshotStore, tmp_path: Path) -> None:
    victim = store.path / names(store)[2]
    damage(victim, 1, 100)
    result = run("fsck", tmp_path)
    assert result.exit_code == 3
    assert "layer 1, position 96" in result.output
    assert victim.exists()
    assert run("fsck", tmp_path, "--quick").exit_code == 0


def test_repair_quarantines_keeps_what_is_good_and_relinks_chains(store: SnapshotStore, tmp_path: Path) -> None:
    first, _, middle, last = names(store)
    damage(store.path / first, 0, 64)
    result = run("fsck", tmp_path, "--repair")
    assert result.exit_code == 3
    assert "rows up to 63" in result.output
    assert not (store.path / first).exists()
    again = open_store(tmp_path)
    assert again.find(fork_ids()).n_common == 70  # its parent is gone; the saved part takes it in
    assert again.find(IDS).n_common == 64
    report = facts("fsck", tmp_path)
    assert {Path(p["file"]).name: p["problem"] for p in report["problems"]} == {
        middle: "orphan_segment",
        last: "orphan_segment",
    }
    assert run("fsck", tmp_path).exit_code == 0
    again.publish(IDS[:80], MemoryRows(K, -K))
    assert open_store(tmp_path).find(IDS).n_common == 200


def test_repair_quarantines_a_file_with_a_bad_head(store: SnapshotStore, tmp_path: Path) -> None:
    victim = store.path / names(store)[3]
    os.truncate(victim, victim.stat().st_size - 1)
    assert run("fsck", tmp_path, "--repair").exit_code == 3
    assert len(list((store.path / "quarantine").iterdir())) == 1
    assert run("fsck", tmp_path).exit_code == 0


@pytest.mark.parametrize("n_files", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_scrub_finds_every_rotten_file_and_no_other(tmp_path: Path, n_files: int) -> None:
    """Promise 11: one file in ten is rotten; at its full size 100 of 1,000."""
    store = open_store(tmp_path)
    files = []
    for number in range(n_files):
        ids = np.concatenate([np.array([number % 1000, number // 1000], np.int32), IDS[:38]])
        files.append(store.path / store.publish(ids, MemoryRows(K, -K)).name)
    rotten = files[::10]
    for number, path in enumerate(rotten):
        data = bytearray(path.read_bytes())
        data[(number * 7919 + 500) % len(data)] ^= 4
        path.write_bytes(data)
    report = facts("scrub", tmp_path)
    assert sorted(report["quarantined"]) == sorted(map(str, rotten))
    assert run("scrub", tmp_path).exit_code == 0


def test_scrub_keeps_to_its_rate(store: SnapshotStore, tmp_path: Path) -> None:
    n_bytes = facts("scrub", tmp_path)["n_bytes"]
    report = facts("scrub", tmp_path, "--rate", n_bytes / 1e6 / 0.5)
    assert report["seconds"] >= 0.5


@pytest.mark.slow
def test_scrub_uses_its_whole_rate(tmp_path: Path) -> None:
    """Promise 11: within ten percent of what it may read, measured by the bytes of the files."""
    store = open_store(tmp_path)
    for number in range(300):
        ids = np.concatenate([np.array([number], np.int32), IDS[:199]])
        store.publish(ids, MemoryRows(K, -K))
    n_bytes = sum(path.stat().st_size for path in store.path.glob("kv3_*"))
    report = facts("scrub", tmp_path, "--rate", n_bytes / 1e6 / 10)
    assert abs(n_bytes / 10 - n_bytes / report["seconds"]) <= n_bytes / 100


def test_a_pace_waits_for_what_was_read_too_soon_and_for_nothing_else() -> None:
    now_s, waits = [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now_s[0] += seconds

    pace = Pace(1000, lambda: now_s[0], sleep)
    pace.read(500)
    assert waits == [0.5]
    now_s[0] = 3.0  # the disk was slow, or somebody else's
    pace.read(1000)
    assert (waits, pace.seconds) == ([0.5], 3.0)
    pace.read(2500)
    assert (sum(waits), pace.seconds, pace.n_bytes) == (1.5, 4.0, 4000)
    Pace(0, lambda: 0.0, sleep).read(1 << 40)
    assert len(waits) == 2


def test_gc_removes_old_orphans_and_trash_only(store: SnapshotStore, tmp_path: Path) -> None:
    first, *_, last = names(store)
    (store.path / first).unlink()
    assert run("gc", tmp_path).exit_code == 0
    assert (store.path / last).exists()
    os.utime(store.path / last, (1, 1))
    assert facts("gc", tmp_path)["orphans"] == 1
    assert not (store.path / last).exists()


def test_gc_keeps_an_orphan_whose_parent_came_back_while_it_looked(store, tmp_path: Path, monkeypatch) -> None:
    first, *_, last = names(store)
    os.utime(store.path / last, (1, 1))
    (store.path / first).rename(tmp_path / "aside")
    reap = StoreDirectory.reap

    def reap_while_it_comes_back(directory: StoreDirectory, grace_s: float) -> ReapReport:
        (tmp_path / "aside").rename(store.path / first)
        return reap(directory, grace_s)

    monkeypatch.setattr(StoreDirectory, "reap", reap_while_it_comes_back)
    assert facts("gc", tmp_path)["orphans"] == 0
    assert len(names(store)) == 4


def test_gc_keeps_an_orphan_that_was_used_while_it_looked(store, tmp_path: Path, monkeypatch) -> None:
    first, *_, last = names(store)
    (store.path / first).unlink()
    os.utime(store.path / last, (1, 1))
    now_ns = StoreDirectory.now_ns

    def now_while_it_is_used(directory: StoreDirectory) -> int:
        os.utime(store.path / last)
        return now_ns(directory)

    monkeypatch.setattr(StoreDirectory, "now_ns", now_while_it_is_used)
    assert facts("gc", tmp_path)["orphans"] == 0
    assert (store.path / last).exists()


def before_it_is_taken(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """What another party does between our last look at a file and its going."""
    take = StoreDirectory._move_to_trash

    def be_overtaken(directory: StoreDirectory, *what: Any) -> bool:
        act()
        return take(directory, *what)

    monkeypatch.setattr(StoreDirectory, "_move_to_trash", be_overtaken)


@pytest.mark.parametrize("what", ["it is used", "its parent comes back"])
def test_gc_puts_an_orphan_back_that_was_needed_as_it_went(store, tmp_path: Path, monkeypatch, what: str) -> None:
    first, *_, last = names(store)
    (store.path / first).rename(tmp_path / "aside")
    os.utime(store.path / last, (1, 1))
    before_it_is_taken(
        monkeypatch,
        lambda: (
            os.utime(store.path / last) if what == "it is used" else (tmp_path / "aside").rename(store.path / first)
        ),
    )
    assert facts("gc", tmp_path)["orphans"] == 0
    assert (store.path / last).exists()
    assert not list((store.path / "trash").iterdir())


def test_rm_puts_back_what_a_node_continued_as_it_went(store, tmp_path: Path, monkeypatch) -> None:
    n_before = len(names(store))
    other, rows = np.concatenate([IDS, np.full(20, 901, np.int32)]), np.zeros((2, 220, 16), np.float32)
    node = open_store(tmp_path)
    before_it_is_taken(monkeypatch, lambda: node.publish(other, MemoryRows(rows, rows)))
    assert facts("rm", tmp_path, "--tokens", ",".join(map(str, IDS)))["removed"] == []
    assert len(names(store)) == n_before + 1
    assert open_store(tmp_path).statistics().n_orphans == 0
    assert not list((store.path / "trash").iterdir())


def test_du_shows_what_sharing_saves(store: SnapshotStore, tmp_path: Path) -> None:
    (row,) = facts("du", tmp_path)
    assert (row["model"], row["version"], row["rows"], row["n_files"]) == ("feed", 3, "F32", 4)
    assert row["n_bytes_if_not_shared"] > row["n_bytes"]
    assert "feed" in run("du", tmp_path).output


def test_rm_removes_a_conversation_and_leaves_what_others_share(store: SnapshotStore, tmp_path: Path) -> None:
    first, fork, middle, last = names(store)
    result = run("rm", tmp_path, "--name", first)
    assert "continue" in str(result.exception)
    assert set(facts("rm", tmp_path, "--name", last)["removed"]) == {str(store.path / n) for n in (last, middle)}
    assert sorted(names(store)) == sorted([first, fork])
    tokens = ",".join(map(str, fork_ids()))
    assert set(facts("rm", tmp_path, "--tokens", tokens)["removed"]) == {str(store.path / fork)}
    assert facts("rm", tmp_path, "--tokens", ",".join(map(str, IDS)))["removed"] == [str(store.path / first)]


@pytest.mark.parametrize("n_before", [0, 1])
def test_rm_keeps_what_a_node_continued_while_it_looked(store, tmp_path: Path, monkeypatch, n_before) -> None:
    """Before it deletes anything, and between two deletions."""
    first, _, middle, last = names(store)
    delete, is_still_whole = StoreDirectory.delete_unless, OpenStore.is_still_whole
    n_deleted: list[str] = []

    def delete_and_count(directory: StoreDirectory, name: str, is_needed: Any) -> bool:
        is_gone = delete(directory, name, is_needed)
        n_deleted.append(name)
        return is_gone

    def look_after_a_save(opened: OpenStore, folder: Folder, *taken: str) -> bool:
        if len(n_deleted) == n_before and not taken:
            other = np.concatenate([IDS[: 200 if n_before == 0 else 130], np.full(20, 901, np.int32)])
            rows = np.zeros((2, 220, 16), np.float32)
            open_store(tmp_path).publish(other, MemoryRows(rows, rows))
        return is_still_whole(opened, folder, *taken)

    monkeypatch.setattr(StoreDirectory, "delete_unless", delete_and_count)
    monkeypatch.setattr(OpenStore, "is_still_whole", look_after_a_save)
    removed = facts("rm", tmp_path, "--tokens", ",".join(map(str, IDS)))["removed"]
    assert removed == ([] if n_before == 0 else [str(store.path / last)])
    assert {first, middle} <= set(names(store))
    assert open_store(tmp_path).statistics().n_orphans == 0


def test_ls_lcp_inspect_verify_and_dump_know_chains(store: SnapshotStore, tmp_path: Path) -> None:
    last = store.path / names(store)[3]
    assert "ok, from 130" in run("ls", tmp_path).output
    best = facts("lcp", tmp_path, "--tokens", ",".join(map(str, IDS)))["best"]
    assert best == {"file": f"feed/{last.name}", "n_common": 200, "n_tokens": 200}
    shown = run("inspect", last)
    assert shown.exit_code == 0
    for word in ("positions   130 to 199", "fingerprint feed", "F32, rows", "prefix"):
        assert word in shown.output
    assert run("dump", last, "--output", tmp_path / "rows.safetensors").exit_code == 0
    rows = load_file(tmp_path / "rows.safetensors")
    assert rows["k"].tobytes() == K.tobytes()
    assert np.array_equal(rows["token_ids"], IDS)
    assert run("verify", last).exit_code == 0
    damage(last, 0, 140)
    assert run("verify", last).exit_code == 51
