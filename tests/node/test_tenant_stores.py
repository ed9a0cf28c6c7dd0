"""What tenants' stores have in common: their counts, also of what failed before there was a folder to save into."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvferry.node.tenant_stores import TenantStores
from kvferry.store.errors import StoreFull
from kvferry.store.faults import Fault, FaultyFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.snapshot_store import SnapshotStore


def test_a_disk_without_room_for_a_tenants_folder_is_a_save_without_room(tmp_path: Path) -> None:
    fs = FaultyFileSystem(Fault("make_directories", errno.ENOSPC, times=1))
    shape = KvGeometry(3, 1, 8)
    stores = TenantStores(
        lambda namespace: SnapshotStore(tmp_path, f"feed{namespace}", shape, 1000, 1 << 30, 1000, "n", fs=fs)
    )
    with pytest.raises(StoreFull):
        stores.prepared("-of-a-tenant")
    assert (stores.statistics().n_failed_saves, stores.statistics().n_without_room) == (1, 1)
    stores.prepared("-of-a-tenant")
    assert stores.statistics().n_failed_saves == 1
