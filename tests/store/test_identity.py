"""A store tells who it is, by an id that nobody ever replaces."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from kvferry.store.errors import StoreUnavailable
from kvferry.store.faults import Fault, FaultyFileSystem
from kvferry.store.fs import PosixFileSystem
from kvferry.store.identity import STORE_ID_FILE, ensure_store_id, read_store_id

FS = PosixFileSystem()


def hex_digits(n: int) -> str:
    return f"{n:032x}"


def test_the_first_who_asks_gives_the_id_and_all_others_get_it(tmp_path: Path) -> None:
    root = tmp_path / "store"
    assert read_store_id(FS, root) == ""
    assert ensure_store_id(FS, root, lambda: hex_digits(1)) == hex_digits(1)
    assert ensure_store_id(FS, root, lambda: hex_digits(2)) == hex_digits(1)
    assert read_store_id(FS, root) == hex_digits(1)
    assert [path.name for path in root.iterdir()] == [STORE_ID_FILE]


def test_of_many_who_ask_at_once_one_gives_it(tmp_path: Path) -> None:
    start, found = threading.Barrier(16), []

    def ask(n: int) -> None:
        fresh = iter((hex_digits(n), hex_digits(n + 1)))
        start.wait()
        found.append(ensure_store_id(FS, tmp_path, lambda: next(fresh)))

    threads = [threading.Thread(target=ask, args=(2 * n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


@pytest.mark.parametrize("content", [b"", b"abc", b"Z" * 32])
def test_what_is_no_id_is_none_and_stays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STORE_ID_FILE).write_bytes(content)
    assert ensure_store_id(FS, tmp_path, lambda: hex_digits(1)) == ""
    assert (tmp_path / STORE_ID_FILE).read_bytes() == content


def test_a_disk_that_fails_is_the_stores_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        ensure_store_id(FaultyFileSystem(Fault("fsync", errno.EIO)), tmp_path, lambda: hex_digits(1))
    assert list(tmp_path.iterdir()) == []
