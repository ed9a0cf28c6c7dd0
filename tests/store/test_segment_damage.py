"""Damage and failing disks, on version 3: a bad block is located, what lies before it is used, and no request fails."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry.store import vlkv3
from kvferry.store.errors import SnapshotGone, SnapshotRejected, StoreError
from kvferry.store.faults import CALLS, Fault, FaultyFileSystem
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(3, 2, 4)
IDS = np.arange(1, 201, dtype=np.int32)


def _rows() -> MemoryRows:
    k = np.arange(3 * 200 * 8, dtype=np.float32).reshape(3, 200, 8)
    return MemoryRows(k, -k)


def _store(root: Path, **options) -> SnapshotStore:
    settings = {"max_bytes": 1 << 30, "max_files": 1000} | options
    return SnapshotStore(root, "feed", GEOMETRY, 1024, node_id=settings.pop("node_id", "node-1"), version=3, **settings)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.unlink()
    path.write_bytes(data)


def _three_segments(root: Path) -> tuple[SnapshotStore, list[Path]]:
    store = _store(root)
    return store, [store.path / store.publish(IDS[:n], _rows()).name for n in (80, 130, 200)]


def _restored(store: SnapshotStore, n_rows: int = 200) -> int:
    """How many rows come, all of them right."""
    match = store.find(IDS, min_tokens=1)
    if match is None:
        return 0
    rows, wanted = MemoryRows.empty(GEOMETRY, 200), _rows()
    rows.k[:] = rows.v[:] = 7
    try:
        n = store.restore_usable(match, min(n_rows, match.n_common), rows)
    except StoreError:
        return 0
    assert rows.k[:, :n].tobytes() == wanted.k[:, :n].tobytes()
    assert rows.v[:, :n].tobytes() == wanted.v[:, :n].tobytes()
    return n


def test_damage_is_located_to_the_block_and_what_lies_before_it_is_used(tmp_path: Path) -> None:
    cases = 0
    for segment, (start, end) in enumerate([(0, 80), (80, 130), (130, 200)]):
        for layer in range(3):
            for position in range(start, end, 13):
                store, files = _three_segments(tmp_path / str(cases))
                extent = vlkv3.parse_extent(files[segment].read_bytes(), GEOMETRY)
                block = position // 32
                first = max(start, block * 32)
                _flip(files[segment], extent.block_offset(layer, block) + 8)
                assert _restored(store) == first
                assert not files[segment].exists()
                assert len(list((store.path / "quarantine").iterdir())) == 1
                assert store.statistics().n_quarantined == 1
                assert _restored(store) == start  # what was not damaged is still in the store
                cases += 1
    assert cases == 51


def test_a_prefix_before_the_damage_does_not_even_notice_it(tmp_path: Path) -> None:
    """Only the blocks that are used are read and verified."""
    store, files = _three_segments(tmp_path)
    extent = vlkv3.parse_extent(files[1].read_bytes(), GEOMETRY)
    _flip(files[1], extent.block_offset(0, 4) + 3)
    assert _restored(store, 128) == 128
    assert files[1].exists()
    assert _restored(store, 129) == 128
    assert not files[1].exists()


def test_restore_refuses_what_restore_usable_would_give_in_part(tmp_path: Path) -> None:
    store, files = _three_segments(tmp_path)
    _flip(files[2], 320 + 4 * 70 + 5)
    match = store.find(IDS)
    with pytest.raises(SnapshotRejected, match="the first 130 are good"):
        store.restore(match, 200, MemoryRows.empty(GEOMETRY, 200))
    assert store.find(IDS).n_common == 130


def test_what_was_quarantined_is_saved_again_and_takes_its_children_back(tmp_path: Path) -> None:
    store, files = _three_segments(tmp_path)
    _flip(files[0], 320 + 4 * 80 + 5)
    assert _restored(store) == 0
    assert store.statistics().n_orphans == 2
    store.publish(IDS[:80], _rows())
    assert _restored(store) == 200


class Overtaken(PosixFileSystem):
    """Something happens right after the next file was closed."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] | None = None

    def close(self, fd: int) -> None:
        super().close(fd)
        if (deed := self.meanwhile) is not None:
            self.meanwhile = None
            deed()


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("at", [320 + 5, -5], ids=["in the head", "in a block"])
def test_a_damaged_chain_keeps_no_other_from_being_merged(tmp_path: Path, damaged: int, at: int) -> None:
    """It is set aside when a merge meets it, and what comes before the damage is still there."""
    store = _store(tmp_path)
    chats = [np.concatenate([np.full(2, 900 + i, np.int32), IDS[:150]]) for i in range(2)]
    names = [[store.publish(ids[:n], _rows()).name for n in range(2, 153, 2)] for ids in chats]
    path = store.path / names[damaged][60]
    _flip(path, at % path.stat().st_size)
    assert store.compact() > 60
    assert store.statistics().n_quarantined == 1
    good, cut = store.find(chats[1 - damaged]), store.find(chats[damaged])
    assert good is not None
    assert cut is not None
    assert (good.n_common, cut.n_common) == (152, 120)
    store.restore(good, 152, MemoryRows.empty(GEOMETRY, 152))
    store.restore(cut, 120, MemoryRows.empty(GEOMETRY, 120))


@pytest.mark.parametrize("damaged_byte", [320 + 5, 320 + 4 * 80 + 5], ids=["in the head", "in a block"])
def test_what_another_node_has_set_aside_and_saved_again_is_not_set_aside(tmp_path: Path, damaged_byte: int) -> None:
    fs = Overtaken()
    store, files = _store(tmp_path, fs=fs), _three_segments(tmp_path)[1]
    other = _store(tmp_path, node_id="node-2")
    for one in (store, other):
        one.refresh()
    _flip(files[0], damaged_byte)

    def save_again() -> None:
        assert _restored(other) == 0
        other.publish(IDS[:80], _rows())

    fs.meanwhile = save_again
    assert _restored(store) == 0
    assert files[0].exists()
    assert len(list((store.path / "quarantine").iterdir())) == 1
    assert store.refused() == {}
    store.refresh()
    assert _restored(store) == 200


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_vanished_segment_is_a_miss_for_its_part_only(tmp_path: Path, victim: int) -> None:
    store, files = _three_segments(tmp_path)
    files[victim].unlink()
    assert _restored(store) == (0, 80, 130)[victim]
    assert store.refused() == {}


def test_10000_random_bit_flips_change_no_answer(tmp_path: Path) -> None:
    """Promise 4, on a chain: 10,000 flips in 100 rounds of 100."""
    choices = random.Random(4)
    n_flips = 0
    for number in range(100):
        store, files = _three_segments(tmp_path / str(number))
        for _ in range(100):
            _flip_in_place(choices.choice(files), choices)
            n_flips += 1
        assert _restored(store) < 200
        while (n := _restored(store)) and store.refused() and n == 200:
            raise AssertionError("damaged rows were used")
    assert n_flips == 10_000


def _flip_in_place(path: Path, choices: random.Random) -> None:
    with path.open("r+b") as file:
        at = choices.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << choices.randrange(8)]))


ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE]


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("times", [1, None])
def test_an_error_at_any_call_is_the_stores_own_and_harms_nothing(
    call: str, code: int, times: int | None, tmp_path: Path
) -> None:
    """Promise 8: whatever the disk says at whichever call, saves are skipped and rows recomputed."""
    healthy = _store(tmp_path)
    healthy.reap()
    healthy.publish(IDS[:80], _rows())
    fs = FaultyFileSystem()
    store = _store(tmp_path, node_id="node-2", fs=fs)
    store.refresh()
    fs.faults.append(Fault(call, code, times=times))
    for act in (
        lambda: store.publish(IDS, _rows()),
        lambda: _restored(store),
        store.refresh,
        store.compact,
        store.evict,
    ):
        with contextlib.suppress(StoreError):
            act()
    fs.faults.clear()
    store.refresh()
    store.publish(IDS, _rows())
    assert _restored(_store_after_start(tmp_path)) == 200


def _store_after_start(root: Path) -> SnapshotStore:
    store = _store(root, node_id="node-3")
    store.reap()
    store.refresh()
    return store


def test_a_lost_reply_of_the_link_is_a_success(tmp_path: Path) -> None:
    fs = FaultyFileSystem(Fault("link", errno.EIO, times=1, after_doing=True))
    store = _store(tmp_path, fs=fs)
    assert not store.publish(IDS[:80], _rows()).already_there
    assert _restored(store) == 80


def test_two_nodes_that_write_the_same_segment_leave_one(tmp_path: Path) -> None:
    first, second = _store(tmp_path), _store(tmp_path, node_id="node-2")
    a, b = first.publish(IDS[:80], _rows()), second.publish(IDS[:80], _rows())
    assert a.name == b.name
    assert (a.already_there, b.already_there) == (False, True)
    assert len(list(first.path.glob("kv3_*"))) == 1


def test_what_another_node_evicted_is_not_said_to_be_there(tmp_path: Path) -> None:
    store, files = _three_segments(tmp_path)
    files[1].unlink()
    info = store.publish(IDS, _rows())
    assert (info.already_there, info.start) == (False, 80)
    assert _restored(_store_after_start(tmp_path)) == 200


def test_a_damaged_file_does_not_keep_its_name_from_a_good_one(tmp_path: Path) -> None:
    store = _store(tmp_path)
    info = store.publish(IDS[:80], _rows())
    _flip(store.path / info.name, 100)
    other = _store(tmp_path, node_id="node-2")
    assert not other.publish(IDS[:80], _rows()).already_there
    assert _restored(other) == 80


def test_2000_random_interleavings_of_read_evict_and_pin_lose_no_read(tmp_path: Path) -> None:
    """Promise 9 on chains: a read gets right rows, or is a miss; never wrong ones, never an orphan in the store."""
    choices = random.Random(9)
    store = _store(tmp_path, max_bytes=70_000)
    n_read = n_missed = 0
    for number in range(2000):
        session = choices.randrange(6)
        ids = np.concatenate([IDS[:40], np.array([500 + session], np.int32), IDS[41:100]])
        n = choices.choice((40, 60, 80, 100))
        if choices.random() < 0.3:
            try:
                store.publish(ids[:n], _rows())
            except StoreError:
                n_missed += 1
            continue
        match = store.find(ids[:n], min_tokens=1)
        if match is None:
            continue
        rows, wanted = MemoryRows.empty(GEOMETRY, match.n_common), _rows()
        try:
            if number % 3:
                store.restore(match, match.n_common, rows)
            else:
                with store.pin(match.name):
                    try:
                        store.publish(np.full(100, number % 1000, np.int32), _rows())
                    except StoreError:
                        n_missed += 1
                    store.restore(match, match.n_common, rows)
        except SnapshotGone:
            n_missed += 1
            continue
        n_read += 1
        assert np.array_equal(rows.k, wanted.k[:, : match.n_common])
        assert store.statistics().n_orphans == 0
    assert n_read > 1000
    assert n_missed == 0
