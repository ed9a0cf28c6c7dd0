"""The store's path is looked at before anything is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.coordinator.errors import StorePathInvalid
from kvferry.coordinator.snapshots import check_store
from kvferry.store.place import StorePlace


def test_a_file_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(StorePathInvalid, match=f"the store path {tmp_path / 'store'} is not a folder"):
        check_store(StorePlace(str(tmp_path / "store")))


def test_a_folder_nothing_yet_and_no_store_at_all_are_fine(tmp_path: Path) -> None:
    for place in (StorePlace(str(tmp_path)), StorePlace(str(tmp_path / "later")), None):
        check_store(place)


def test_a_key_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StorePathInvalid, match="nokey cannot be read"):
        check_store(StorePlace(str(tmp_path), tmp_path / "nokey"))
