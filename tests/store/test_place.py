"""Where a store is and who may read it: folders, object stores, the fleet's key."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvferry.store.cli import kv
from kvferry.store.errors import StoreMisuse
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.place import StorePlace
from kvferry.store.seals import SealKind
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(3, 2, 4)
IDS = np.arange(1, 41, dtype=np.int32)
K = np.random.default_rng(1).standard_normal((3, 40, 8), np.float32)


def key_file(folder: Path, key: bytes = b"0123456789abcdef0123456789abcdef", mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(key)
    path.chmod(mode)
    return path


def store_at(place: StorePlace, node_id: str = "n", tenant: str = "") -> SnapshotStore:
    fs, root, seal = place.open()
    store = SnapshotStore(
        root, "feed", GEOMETRY, 1024, 1 << 30, 100, node_id, version=3, fs=fs, seal=seal, tenant=tenant
    )
    store.reap()
    store.refresh()
    return store


@pytest.mark.parametrize(("encrypted", "kind"), [(False, SealKind.KEYED), (True, SealKind.ENCRYPTED)])
def test_with_a_key_only_who_has_it_reads_what_was_saved(tmp_path: Path, encrypted: bool, kind: SealKind) -> None:
    place = StorePlace(str(tmp_path / "store"), key_file(tmp_path), encrypted)
    store = store_at(place)
    info = store.publish(IDS, MemoryRows(K, -K))
    content = (store.path / info.name).read_bytes()
    assert content[196] == kind
    assert (IDS.tobytes() in content) is not encrypted
    assert store_at(place, "other").find(IDS).n_common == 40
    without = store_at(StorePlace(str(tmp_path / "store")), "third")
    assert without.find(IDS) is None
    assert without.refused() == {info.name: "key_mismatch"}
    assert (store.path / info.name).exists(), "a file of another key is not damaged"


@pytest.mark.parametrize(
    ("key", "mode", "said"),
    [
        (b"tooshort", 0o600, "key holds 8 bytes.*, not 16 or more"),
        (b"k" * 32, 0o644, "chmod 600"),
        (b"k" * 5000, 0o600, "longer than 4096"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_in_a_sentence_that_does_not_tell_it(
    tmp_path: Path, key: bytes, mode: int, said: str
) -> None:
    with pytest.raises(StoreMisuse, match=said) as error:
        StorePlace(str(tmp_path), key_file(tmp_path, key, mode)).open()
    assert key.decode() not in str(error.value)


def test_a_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreMisuse, match="cannot be read: No such file"):
        StorePlace(str(tmp_path), tmp_path / "nokey").open()


def test_encryption_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(StoreMisuse, match="needs a key"):
        StorePlace(str(tmp_path), encrypted=True).open()


@pytest.mark.skipif(importlib.util.find_spec("obstore") is None, reason="pip install obstore")
def test_an_object_store_is_named_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    place = StorePlace("s3://bucket/deep/prefix")
    assert place.folder is None
    assert place.open()[1] == Path()
    with pytest.raises(StoreMisuse, match="is not s3://BUCKET/PREFIX"):
        StorePlace("s3://").open()


@pytest.mark.parametrize("command", [["ls"], ["fsck"], ["du"], ["scrub"], ["lcp", "--tokens", "1,2,3"]])
def test_offline_commands_take_the_key(tmp_path: Path, command: list[str]) -> None:
    key = key_file(tmp_path)
    store_at(StorePlace(str(tmp_path / "store"), key)).publish(IDS, MemoryRows(K, -K))
    name, *rest = command
    with_key = CliRunner().invoke(kv, [name, str(tmp_path / "store"), *rest, "--store-key-file", str(key), "--json"])
    assert with_key.exit_code == 0, with_key.output
    assert "key_mismatch" not in with_key.output
    files = list((tmp_path / "store" / "feed").glob("*.kv"))
    for one in (["verify"], ["inspect"]):
        judged = CliRunner().invoke(kv, [*one, str(files[0]), "--store-key-file", str(key)])
        assert judged.exit_code == 0, judged.output
        assert CliRunner().invoke(kv, [*one, str(files[0])]).exit_code != 0


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_tenants_files_have_a_key_of_its_own_and_the_commands_find_it(tmp_path: Path, encrypted: bool) -> None:
    place = StorePlace(str(tmp_path / "store"), key_file(tmp_path), encrypted)
    info = store_at(place).publish(IDS, MemoryRows(K, -K))
    theirs = store_at(place, tenant="acme")
    their_info = theirs.publish(IDS, MemoryRows(K, -K))
    assert info.name != their_info.name, "a name tells nobody without the key what is in the file"
    (store_at(place).path / their_info.name).write_bytes((theirs.path / their_info.name).read_bytes())
    assert store_at(place, "other").refused() == {their_info.name: "key_mismatch"}
    (store_at(place).path / their_info.name).unlink()
    options = ["--store-key-file", str(place.key_file), *(["--store-encrypted"] if encrypted else [])]
    for command in (
        ["ls", place.where, "--json"],
        ["scrub", place.where],
        ["fsck", place.where],
        ["verify", str(theirs.path / their_info.name)],
        ["diff", str(store_at(place).path / info.name), str(theirs.path / their_info.name)],
    ):
        done = CliRunner().invoke(kv, [*command, *options])
        assert done.exit_code == 0, (command, done.output)
        assert "key_mismatch" not in done.output


def test_without_a_tenant_nothing_of_the_layout_changes(tmp_path: Path) -> None:
    store = store_at(StorePlace(str(tmp_path)))
    assert store.path == tmp_path / "feed"
    assert store_at(StorePlace(str(tmp_path)), tenant="acme").path.name == "feed-822b33ad87c148a0a20a5ba7"


@pytest.mark.parametrize(
    "where", ["http://10.0.0.1:9000/bucket", "S3://bucket/prefix", "gs://bucket", "file:///mnt/store"]
)
def test_the_address_of_anything_else_is_refused_and_makes_no_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreMisuse, match=r"neither a folder nor s3://BUCKET/PREFIX"):
        StorePlace(where).open()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("obstore") is None, reason="pip install obstore")
@pytest.mark.parametrize("endpoint", ["notaurl", "ftp://10.0.0.1", "http://", "http://host:port", "http://a b/"])
def test_an_endpoint_that_is_no_address_is_refused_before_anything_is_asked(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StoreMisuse, match=r"AWS_ENDPOINT_URL .* is not http\(s\)://HOST"):
        StorePlace("s3://bucket/prefix").open()


@pytest.mark.skipif(importlib.util.find_spec("obstore") is None, reason="pip install obstore")
def test_an_object_store_that_does_not_answer_is_named_with_what_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(OSError, match="s3://bucket/prefix does not answer") as error:
        StorePlace("s3://bucket/prefix").open()[0].names("")
    assert error.value.strerror == (
        "s3://bucket/prefix does not answer; AWS_ENDPOINT_URL says which server is asked, at the moment "
        "http://127.0.0.1:9"
    )
