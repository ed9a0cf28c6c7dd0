"""A conversation's snapshots on their way to another store are published like a node's own."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from kvferry.store.carrying import adopt, rows_of
from kvferry.store.errors import StoreUnavailable
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.place import StorePlace
from kvferry.store.snapshot_store import SnapshotStore

NAME = f"kv3_{'0' * 32}.kv"


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_tenants_sealed_rows_are_found(tmp_path: Path, tenant: str) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    place = StorePlace(str(tmp_path / "store"), key)
    geometry, ids = KvGeometry(2, 2, 8), np.arange(40)
    store = SnapshotStore(
        tmp_path / "store", "feed", geometry, 1024, 1 << 30, 10, "n", version=3, seal=place.seal(), tenant=tenant
    )
    name = store.publish(ids, MemoryRows.empty(geometry, 40)).name
    assert rows_of(place, ids.astype(np.int32)) == [store.path / name]


def test_what_comes_in_is_readable_by_its_group_only_and_never_replaces_a_file(tmp_path: Path) -> None:
    place = StorePlace(str(tmp_path / "store"))
    assert adopt(place, "feed", NAME, 6, [b"abc", b"def"])
    target = tmp_path / "store" / "feed" / NAME
    assert target.read_bytes() == b"abcdef"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert not adopt(place, "feed", NAME, 3, [b"new"])

    def chunks():
        yield b"ghi"
        (target.parent / other).write_bytes(b"a node's own")  # which is quicker

    other = NAME.replace("0", "1")
    assert not adopt(place, "feed", other, 3, chunks())
    assert (target.parent / other).read_bytes() == b"a node's own"


def test_what_comes_in_short_gets_no_name(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="3 bytes after 6"):
        adopt(StorePlace(str(tmp_path / "store")), "feed", NAME, 6, [b"abc"])
    assert not list((tmp_path / "store" / "feed").glob("kv3*"))


def test_the_name_of_what_came_in_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(PosixFileSystem, "fsync_directory", lambda _, directory: synced.append(directory))
    adopt(StorePlace(str(tmp_path / "store")), "feed", NAME, 3, [b"abc"])
    assert synced == [str(tmp_path / "store"), str(tmp_path / "store" / "feed")]
