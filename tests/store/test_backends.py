"""One contract, all backends: a directory, memory, obstore, and S3 (a real SeaweedFS, when it is installed)."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.store.backend.object_fs import ObjectFileSystem
from kvferry.store.backend.objects import MemoryObjects, Objects
from kvferry.store.backend.s3 import S3Objects, open_s3
from kvferry.store.errors import SnapshotGone, StoreMisuse
from kvferry.store.fs import FileSystem, PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(3, 2, 4)
IDS = np.arange(1, 301, dtype=np.int32)
K = np.random.default_rng(1).standard_normal((3, 300, 8), np.float32)
ROWS = MemoryRows(K, -K)
NO_OBSTORE = importlib.util.find_spec("obstore") is None

Place = tuple[FileSystem, Path]


@pytest.fixture(scope="module")
def s3_server(new_s3_server: Callable[[], Any]) -> Any:
    server = new_s3_server()
    server.start()
    return server


BACKENDS = [
    "directory",
    "memory",
    pytest.param("obstore", marks=pytest.mark.skipif(NO_OBSTORE, reason="pip install obstore")),
    pytest.param("s3", marks=pytest.mark.slow),
]


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A file system, and a root in it that nobody else uses."""
    if request.param == "directory":
        return PosixFileSystem(), tmp_path
    if request.param == "memory":
        return ObjectFileSystem(MemoryObjects()), Path("/store")
    if request.param == "obstore":
        from obstore.store import MemoryStore

        return ObjectFileSystem(S3Objects(MemoryStore(), "deep/prefix")), Path("/store")
    server = request.getfixturevalue("s3_server")
    return open_s3(f"s3://{server.bucket}/{uuid.uuid4().hex}", **server.options), Path("/store")


@pytest.fixture
def make(place: Place) -> Callable[..., SnapshotStore]:
    def make(node_id: str = "node-1", **options) -> SnapshotStore:
        fs, root = place
        settings = {"max_bytes": 1 << 30, "max_files": 1000, "version": 3} | options
        store = SnapshotStore(root, "feed", GEOMETRY, 1024, node_id=node_id, fs=fs, **settings)
        store.reap()
        store.refresh()
        return store

    return make


def _assert_gives(store: SnapshotStore, n: int, ids: np.ndarray = IDS) -> None:
    match = store.find(ids)
    assert match is not None
    assert match.n_common == n
    rows = MemoryRows.empty(GEOMETRY, n)
    store.restore(match, n, rows)
    assert rows.k.tobytes() == K[:, :n].tobytes()
    assert rows.v.tobytes() == (-K[:, :n]).tobytes()


def test_what_one_node_publishes_another_restores(make) -> None:
    store = make()
    for n in (40, 100, 300):
        assert store.publish(IDS[:n], ROWS).n_tokens == n
    other = make("node-2")
    _assert_gives(other, 300)
    match = other.find(IDS[:50])
    rows = MemoryRows.empty(GEOMETRY, 50)
    other.restore(match, 50, rows)
    assert rows.k.tobytes() == K[:, :50].tobytes()


@pytest.mark.parametrize("version", [1, 3])
def test_a_name_is_published_once_and_never_overwritten(make, version: int) -> None:
    first = make(version=version)
    second = make("node-2", version=version)
    assert not first.publish(IDS[:60], ROWS).already_there
    assert second.publish(IDS[:60], ROWS).already_there
    assert len(make("node-3")._directory.snapshot_names()) == 1


def test_announced_names_are_opened_exactly(make) -> None:
    reader = make("node-2")
    info = make().publish(IDS[:60], ROWS)
    assert reader.announce(info.name)
    _assert_gives(reader, 60)
    assert not reader.announce("kv3_" + "0" * 32 + ".kv")


def test_a_vanished_file_is_a_miss(make) -> None:
    writer = make()
    info = writer.publish(IDS[:60], ROWS)
    reader = make("node-2")
    match = reader.find(IDS)
    writer._directory.delete(info.name)
    with pytest.raises(SnapshotGone):
        reader.restore(match, 60, MemoryRows.empty(GEOMETRY, 60))
    assert reader.find(IDS) is None


def test_the_budget_holds_and_evicted_files_are_gone(make) -> None:
    store = make(max_bytes=40_000, trash_grace_s=0)
    for number in range(8):
        ids = np.concatenate([np.array([900 + number], np.int32), IDS[:39]])
        store.publish(ids, ROWS)
    sizes = store._directory.survey(store._directory.now_ns()).n_bytes
    assert sizes <= 40_000
    assert store.statistics().n_evicted >= 3
    assert 0 < make("node-2").statistics().n_known < 8


def test_damage_is_found_and_quarantined(make, place: Place) -> None:
    store = make()
    info = store.publish(IDS[:100], ROWS)
    fs, _ = place
    path = str(store.path / info.name)
    fd = fs.open_read(path)
    data = bytearray(info.n_bytes)
    at = 0
    while at < len(data):
        at += fs.preadv(fd, [memoryview(data)[at:]], at)
    fs.close(fd)
    data[320 + 400 + 64 * 33 + 5] ^= 1  # layer 0, block 1
    fs.unlink(path)
    fd = fs.create(path + ".new")
    fs.writev(fd, [memoryview(data)])
    fs.close(fd)
    fs.link(path + ".new", path)
    fs.unlink(path + ".new")
    reader = make("node-2")
    rows = MemoryRows.empty(GEOMETRY, 100)
    assert reader.restore_usable(reader.find(IDS), 100, rows) == 32
    assert rows.k[:, :32].tobytes() == K[:, :32].tobytes()
    assert len(list(reader._directory.quarantined())) == 1
    assert make("node-3").find(IDS) is None


def test_compaction_and_crash_leftovers(make) -> None:
    store = make()
    for n in range(4, 301, 4):
        store.publish(IDS[:n], ROWS)
    assert store.compact() > 60
    _assert_gives(make("node-2"), 300)
    fs = store._directory.fs
    fs.close(fs.create(str(store.path / f"kv3_{'0' * 32}.kv.node-1.{'1' * 32}.99.tmp")))
    assert store._directory.survey(store._directory.now_ns()).temp_bytes >= 99
    assert make().statistics().n_known >= 1
    assert store._directory.survey(store._directory.now_ns()).temp_bytes == 0


@pytest.fixture(params=[BACKENDS[1], BACKENDS[2], BACKENDS[3]])
def objects(request: pytest.FixtureRequest) -> Objects:
    """An object store, and keys in it that nobody else uses."""
    if request.param == "memory":
        return MemoryObjects()
    if request.param == "obstore":
        from obstore.store import MemoryStore

        return S3Objects(MemoryStore())
    from obstore.store import S3Store

    server = request.getfixturevalue("s3_server")
    return S3Objects(S3Store(server.bucket, **server.options), uuid.uuid4().hex)


def put(objects: Objects, key: str, content: bytes) -> str:
    """Returns whose content it was that is there now."""
    with contextlib.suppress(FileExistsError):
        objects.put_new(key, io.BytesIO(content), len(content))
    facts = objects.head(key)
    return bytes(objects.get(key, 0, facts.n_bytes, facts.tag)).decode()


def test_of_many_who_create_an_object_at_once_one_does(objects: Objects) -> None:
    for number in range(5):
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda who, n=number: put(objects, f"a/{n}", b"by %d" % who), range(8)))
        assert len(found) == 1
    with pytest.raises(FileExistsError):
        objects.put_new("a/0", io.BytesIO(b"again"), 5)
    assert objects.names("a/") == ["0", "1", "2", "3", "4"]


def test_a_part_is_read_of_the_very_object_that_was_looked_at(objects: Objects) -> None:
    content = bytes(range(256)) * 40
    objects.put_new("k", io.BytesIO(content), len(content))
    tag = objects.head("k").tag
    assert bytes(objects.get("k", 1000, 1300, tag)) == content[1000:1300]
    objects.delete("k")
    objects.put_new("k", io.BytesIO(content[::-1]), len(content))
    with pytest.raises(OSError, match="Stale") as error:
        objects.get("k", 0, 5, tag)
    assert error.value.errno == errno.ESTALE
    objects.delete("k")
    for call in (objects.head, objects.delete):
        with pytest.raises(FileNotFoundError):
            call("k")


@pytest.mark.slow
def test_a_large_segment_goes_up_in_parts_and_comes_back_in_ranges(s3_server: Any) -> None:
    fs = open_s3(f"s3://{s3_server.bucket}/{uuid.uuid4().hex}", **s3_server.options)
    geometry = KvGeometry(4, 4, 64)
    k = np.random.default_rng(3).standard_normal((4, 6000, 256), np.float32)
    store = SnapshotStore(Path("/big"), "feed", geometry, 10_000, 1 << 40, 100, "n", fs=fs, version=3)
    store.reap()
    ids = np.arange(1, 6001)
    assert store.publish(ids, MemoryRows(k, -k)).n_bytes > 32 << 20
    rows = MemoryRows.empty(geometry, 6000)
    store.restore(store.find(ids), 6000, rows)
    assert rows.k.tobytes() == k.tobytes()
    part = MemoryRows.empty(geometry, 100)
    store.restore(store.find(ids[:100]), 100, part)
    assert part.v.tobytes() == (-k[:, :100]).tobytes()


def test_a_url_that_is_none_is_a_wrong_setting() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(StoreMisuse, match="s3://BUCKET/PREFIX"):
        open_s3("http://somewhere")
