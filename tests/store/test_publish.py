"""Publishing: what is there afterwards, and that nothing of a failed save stays. Promise 8's second half: every errno
at every call."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvferry.store import vlkv
from kvferry.store.errors import (
    NameTaken,
    SnapshotGone,
    SnapshotRejected,
    StoreError,
    StoreFull,
    StoreMisuse,
    StoreUnavailable,
)
from kvferry.store.faults import CALLS, Fault, FaultyFileSystem
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.inspection import load_snapshot
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

IDS = np.arange(1, 41)
ERRNOS = ("ENOSPC", "EDQUOT", "EIO", "ESTALE", "EROFS", "EACCES")


def _files(store: SnapshotStore) -> set[str]:
    return {path.name for path in store.path.iterdir() if path.is_file()}


def _assert_holds(store: SnapshotStore, ids: np.ndarray, rows: MemoryRows) -> None:
    """A fresh look at the directory finds the snapshot and reads the same rows."""
    reader = SnapshotStore(store.path.parent, store.path.name, store.geometry, 1024, 1 << 30, 10, "reader")
    reader.refresh()
    match = reader.find(ids)
    assert match is not None
    assert match.n_common == len(ids)
    restored = MemoryRows.empty(store.geometry, len(ids))
    reader.restore(match, len(ids), restored)
    assert np.array_equal(restored.k, rows.k)
    assert np.array_equal(restored.v, rows.v)


def test_a_snapshot_is_one_file_named_after_its_tokens_for_us_alone(make_store, make_rows, tiny) -> None:
    store = make_store()
    store.reap()
    info = store.publish(IDS, make_rows(tiny, 40))
    assert info.name == vlkv.file_name(vlkv.fnv1a(IDS.astype(np.int32)))
    assert not info.already_there
    assert _files(store) == {info.name}
    status = (store.path / info.name).stat()
    assert status.st_size == info.n_bytes == vlkv.file_bytes(tiny, 40)
    assert status.st_nlink == 1
    assert status.st_mode & 0o007 == 0
    assert store.path.stat().st_mode & 0o007 == 0
    _assert_holds(store, IDS, make_rows(tiny, 40))


def test_the_order_of_calls_is_that_of_a_durable_publication(make_store, make_rows, tiny) -> None:
    fs = FaultyFileSystem()
    store = make_store(fs=fs)
    store.reap()
    fs.calls.clear()
    store.publish(IDS, make_rows(tiny, 40))
    order = [
        call for call in fs.calls if call in {"create", "writev", "fsync", "close", "link", "unlink", "fsync_directory"}
    ]
    written = [call for call in order if call != "writev"]
    assert written == ["create", "fsync", "close", "link", "fsync_directory", "unlink"]
    assert order.index("fsync") > max(at for at, call in enumerate(order) if call == "writev")


def test_the_disk_begins_with_what_is_written_before_all_of_it_is(make_store, make_rows, tiny, monkeypatch) -> None:
    monkeypatch.setattr("kvferry.store.publish.BEGIN_BYTES", 1024)
    told: list[tuple[int, int]] = []

    class Told(PosixFileSystem):
        def begin_sync(self, fd: int, offset: int, n_bytes: int) -> None:
            told.append((offset, n_bytes))
            assert offset + n_bytes == os.fstat(fd).st_size
            super().begin_sync(fd, offset, n_bytes)

    store = make_store(fs=Told())
    store.reap()
    info = store.publish(IDS, make_rows(tiny, 40))
    assert len(told) > 1
    assert told == [(sum(n for _, n in told[:i]), n) for i, (_, n) in enumerate(told)]  # every byte once, in order
    assert info.n_bytes - sum(n for _, n in told) < 1024
    fault = Fault("begin_sync", errno.EIO)  # a hint: what is really wrong, fsync tells
    store = make_store(fs=FaultyFileSystem(fault), root=store.path.parent, fingerprint="other")
    store.reap()
    store.publish(IDS, make_rows(tiny, 40))
    assert fault.n_seen == len(told)
    _assert_holds(store, IDS, make_rows(tiny, 40))


def test_the_same_tokens_again_are_already_there_and_count_as_used(make_store, make_rows, tiny) -> None:
    store = make_store()
    first = store.publish(IDS, make_rows(tiny, 40))
    os.utime(store.path / first.name, (1, 1))
    inode = (store.path / first.name).stat().st_ino
    second = make_store("node-2").publish(IDS, make_rows(tiny, 40))
    assert second.already_there
    assert second.name == first.name
    assert (store.path / first.name).stat().st_ino == inode
    assert (store.path / first.name).stat().st_mtime > 1


def test_two_sequences_with_one_hash_keep_the_older_and_never_mix(make_store, make_rows, tiny, monkeypatch) -> None:
    """Promise 23: a hash that collides every time gives no wrong answer."""
    monkeypatch.setattr(vlkv, "fnv1a", lambda token_ids: 0xC0111DE)
    store = make_store()
    older, newer = IDS, IDS[::-1].copy()
    store.publish(older, make_rows(tiny, 40))
    content = (store.path / "kv_000000000c0111de.kv").read_bytes()
    with pytest.raises(NameTaken, match="other token ids"):
        store.publish(newer, make_rows(tiny, 40))
    assert (store.path / "kv_000000000c0111de.kv").read_bytes() == content
    assert store.find(newer) is None
    _assert_holds(store, older, make_rows(tiny, 40))


def test_a_file_swapped_for_one_with_the_same_hash_is_not_restored(make_store, make_rows, tiny, monkeypatch) -> None:
    monkeypatch.setattr(vlkv, "fnv1a", lambda token_ids: 0xC0111DE)
    reader, writer = make_store(), make_store("node-2")
    reader.publish(IDS, make_rows(tiny, 40))
    match = reader.find(IDS)
    (reader.path / match.name).unlink()
    writer.publish(IDS[::-1].copy(), make_rows(tiny, 40))
    with pytest.raises(SnapshotRejected, match="token_prefix_mismatch"):
        reader.restore(match, 40, MemoryRows.empty(tiny, 40))
    assert reader.find(IDS) is None


def test_a_refused_file_under_the_name_stays_and_is_reported(make_store, make_rows, tiny) -> None:
    store = make_store()
    info = store.publish(IDS, make_rows(tiny, 40))
    with (store.path / info.name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(NameTaken, match="size_mismatch"):
        make_store("node-2").publish(IDS, make_rows(tiny, 40))
    assert (store.path / info.name).stat().st_size == info.n_bytes + 1


@pytest.mark.parametrize("call", [call for call in CALLS if call not in {"open_read", "preadv"}])
@pytest.mark.parametrize("error", ERRNOS)
def test_injected_errno_at_every_call_of_publish_fails_the_save_cleanly_or_not_at_all(
    call: str, error: str, make_store, make_rows, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the n-th occurrence of the call, each n: a typed error or success; afterwards the name has all of the
    snapshot, or nothing."""
    monkeypatch.setattr("kvferry.store.publish.BEGIN_BYTES", 1024)
    n_occurrences = 0
    while True:
        fault = Fault(call, getattr(errno, error), skip=n_occurrences)
        root = tmp_path / f"at-{n_occurrences}"  # neighbours in one store are looked at as well
        make_store("other", root=root, fingerprint="never").reap()
        store = make_store(fs=FaultyFileSystem(fault), root=root)
        failure: StoreError | None = None
        try:
            store.publish(IDS, make_rows(tiny, 40))
        except (StoreFull, StoreUnavailable) as raised:
            failure = raised
        assert failure is None or failure.recovery in {"retry", "skip_save", "page_operator", "recompute"}
        left = _files(store) if store.path.exists() else set()
        snapshots = {name for name in left if name.endswith(".kv")}
        for name in snapshots:
            load_snapshot(PosixFileSystem(), store.path / name, tiny, 1024)
        assert snapshots or failure is not None
        if call not in {"unlink", "close"}:
            assert left == snapshots
        if fault.n_seen <= n_occurrences:
            break
        n_occurrences += 1
    assert n_occurrences >= (call not in {"rename", "touch", "names"})


@pytest.mark.parametrize("error", ERRNOS)
@pytest.mark.parametrize("call", ["open_read", "fstat", "preadv"])
def test_injected_errno_at_every_call_of_restore_is_a_miss_or_an_unavailable_store(
    call: str, error: str, make_store, make_rows, tiny
) -> None:
    make_store().publish(IDS, make_rows(tiny, 40))
    fault = Fault(call, getattr(errno, error), skip=1_000_000)
    store = make_store("node-2", fs=FaultyFileSystem(fault))
    store.refresh()
    match = store.find(IDS)
    for n_before in range(8):
        fault.skip, fault.n_seen = n_before, 0
        try:
            store.restore(match, 40, MemoryRows.empty(tiny, 40))
        except SnapshotGone:
            assert error == "ESTALE"
            assert store.find(IDS) is None
            store.refresh()
        except (StoreUnavailable, StoreFull):
            assert error != "ESTALE"
            assert store.find(IDS) is not None
        else:
            assert fault.n_seen <= n_before
    fault.skip = 1_000_000
    store.refresh()
    store.restore(store.find(IDS), 40, MemoryRows.empty(tiny, 40))


def test_a_stale_handle_is_opened_once_more(make_store, make_rows, tiny) -> None:
    rows = make_rows(tiny, 40)
    store = make_store(fs=FaultyFileSystem(Fault("preadv", errno.ESTALE, skip=2, times=1)))
    store.publish(IDS, rows)
    restored = MemoryRows.empty(tiny, 40)
    store.restore(store.find(IDS), 40, restored)
    assert np.array_equal(restored.k, rows.k)


def test_a_close_that_reports_a_lost_write_fails_the_save(make_store, make_rows, tiny) -> None:
    fs = FaultyFileSystem()
    store = make_store(fs=fs)
    store.reap()
    fs.faults.append(Fault("close", errno.EDQUOT, times=1, after_doing=True))
    fs.faults.append(Fault("create", errno.EDQUOT, skip=2))
    with pytest.raises(StoreFull, match="quota"):
        store.publish(IDS, make_rows(tiny, 40))
    assert not _files(store)


def test_a_link_whose_reply_was_lost_is_recognised_by_its_inode(make_store, make_rows, tiny) -> None:
    for error in (errno.EEXIST, errno.EIO, errno.ETIMEDOUT):
        store = make_store(fs=FaultyFileSystem(Fault("link", error, after_doing=True)), fingerprint=f"e{error}")
        assert not store.publish(IDS, make_rows(tiny, 40)).already_there
        assert len(_files(store)) == 1
        _assert_holds(store, IDS, make_rows(tiny, 40))


@pytest.mark.parametrize("error", ["EPERM", "ENOTSUP", "ENOSYS"])
def test_where_links_are_not_supported_rename_publishes(error: str, make_store, make_rows, tiny) -> None:
    store = make_store(fs=FaultyFileSystem(Fault("link", getattr(errno, error))))
    info = store.publish(IDS, make_rows(tiny, 40))
    assert _files(store) == {info.name}
    assert store.publish(IDS, make_rows(tiny, 40)).already_there


def test_a_writer_that_was_overtaken_keeps_the_first_file(make_store, make_rows, tiny) -> None:
    """The other node publishes between our look at the name and our link."""
    winner = make_store("node-2")
    rows = make_rows(tiny, 40)

    def overtake(call: str) -> None:
        if call == "link":
            winner.publish(IDS, rows)

    store = make_store(fs=FaultyFileSystem(on_call=overtake))
    assert store.publish(IDS, rows).already_there
    assert len(_files(store)) == 1
    _assert_holds(store, IDS, rows)


def test_a_directory_that_cannot_be_synced_is_as_durable_as_it_gets(make_store, make_rows, tiny) -> None:
    store = make_store(fs=FaultyFileSystem(Fault("fsync_directory", errno.EINVAL)))
    assert not store.publish(IDS, make_rows(tiny, 40)).already_there


def test_a_source_that_fails_leaves_nothing(make_store, make_rows, tiny) -> None:
    class Failing(MemoryRows):
        def read_rows(self, layer, start, stop, k_out, v_out) -> None:
            if layer == 2:
                raise RuntimeError("the sequence was released")

    store = make_store()
    rows = make_rows(tiny, 40)
    with pytest.raises(RuntimeError):
        store.publish(IDS, Failing(rows.k, rows.v))
    assert not _files(store)


@pytest.mark.parametrize("ids", [[], [[1, 2]], [-1], [1024], [1, 2, 4096]])
def test_ids_that_every_reader_would_refuse_are_not_written(ids, make_store, make_rows, tiny) -> None:
    store = make_store()
    with pytest.raises(StoreMisuse):
        store.publish(ids, make_rows(tiny, 3))
    assert not store.path.exists()


def test_a_store_path_that_is_a_file_is_said_in_one_sentence(tmp_path: Path, make_store, make_rows, tiny) -> None:
    (tmp_path / "store").write_text("")
    store = make_store(root=tmp_path / "store")
    for attempt in (store.reap, store.refresh, lambda: store.publish(IDS, make_rows(tiny, 40))):
        with pytest.raises(StoreUnavailable, match="name another store directory") as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_every_error_says_what_where_and_what_to_do() -> None:
    for cls in (SnapshotRejected, StoreUnavailable, SnapshotGone, StoreFull, NameTaken, StoreMisuse):
        assert issubclass(cls, StoreError)
        assert cls.code
    assert len({cls.code for cls in (SnapshotRejected, StoreUnavailable, SnapshotGone, StoreFull, NameTaken)}) == 5


def test_the_buffers_stay_small_whatever_the_snapshot(make_store, tiny) -> None:
    """No second copy of the cache: what read_rows is handed never exceeds the buffer."""
    big = KvGeometry(2, 8, 128)
    seen: list[int] = []

    class Zeros:
        def read_rows(self, layer, start, stop, k_out, v_out) -> None:
            seen.append(k_out.nbytes + v_out.nbytes)
            k_out[:] = v_out[:] = 0

    make_store(geometry=big).publish(np.zeros(3000, np.int32), Zeros())
    assert max(seen) <= 1 << 20
    assert len(seen) == 2 * 25  # 128 rows of 8 KiB each time, then the tail; for two layers


def test_a_name_that_was_evicted_before_it_could_be_compared_is_taken_after_all(make_store, make_rows, tiny) -> None:
    """Another node publishes the same tokens just before us, and its file is evicted just after our link failed."""
    rows, other = make_rows(tiny, 40), make_store("node-2")
    events = {"link": lambda: other.publish(IDS, rows), "open_read": lambda: next(other.path.glob("*.kv")).unlink()}

    def meddle(call: str) -> None:
        if call in events:
            events.pop(call)()

    store = make_store(fs=FaultyFileSystem(on_call=meddle))
    assert not store.publish(IDS, rows).already_there
    assert not events
    _assert_holds(store, IDS, rows)
