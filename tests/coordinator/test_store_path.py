"""The store's path is looked at before anything is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.coordinator.errors import StorePathInvalid
from kvferry.coordinator.snapshots import check_store_path


def test_a_file_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(StorePathInvalid, match=f"the store path {tmp_path / 'store'} is not a folder"):
        check_store_path(tmp_path / "store")


def test_a_folder_nothing_yet_and_no_store_at_all_are_fine(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "later", None):
        check_store_path(root)
