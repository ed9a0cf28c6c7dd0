"""Promise 5: nothing outside the directory is opened, whatever a name or an entry says. Damaged bytes are
test_every_version's."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import numpy as np
import pytest

from kvferry.store import names, vlkv
from kvferry.store.errors import SnapshotRejected
from kvferry.store.faults import FaultyFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows

GEOMETRY = KvGeometry(3, 2, 4)
N_TOKENS = 50
IDS = np.arange(1, N_TOKENS + 1, dtype=np.int32)
VOCAB = 1024
NAME = vlkv.file_name(vlkv.fnv1a(IDS))


HOSTILE_NAMES = [
    "", ".", "..", "/", "//", "/etc/passwd", "../etc/passwd", "../../x", "./kv_0123456789abcdef.kv",
    "a/../kv_0123456789abcdef.kv", "kv_0123456789abcdef.kv/", "kv_0123456789abcdef.kv/..", "/kv_0123456789abcdef.kv",
    "kv_0123456789abcdef.kv\u0000", "\u0000kv_0123456789abcdef.kv", "kv_0123456789abcdef.kv\n",
    "\nkv_0123456789abcdef.kv", " kv_0123456789abcdef.kv", "kv_0123456789ABCDEF.kv", "KV_0123456789abcdef.kv",
    "kv_0123456789abcde.kv", "kv_0123456789abcdef0.kv", "kv_0123456789abcdeg.kv", "kv_0123456789abcdef",
    "kv_0123456789abcdef.kv.tmp", "kv_0123456789abcdef.KV", "kv_01234567\uff1889abcde.kv",
    "kv_\u0660123456789abcdef.kv", "trash/kv_0123456789abcdef.kv", "trash", "kv_%2e%2e%2f%2e%2e%2f.kv",
    "kv_..............kv", "~", "~root", "$HOME", "`id`", "*", "kv_*.kv", "-rf", "C:\\x", "\\\\host\\x", "a" * 4096,
    "kv_" + "0" * 10_000 + ".kv",
]  # fmt: skip


def test_200_hostile_names_are_refused_before_anything_is_opened(make_store) -> None:
    fs = FaultyFileSystem()
    store = make_store(fs=fs)
    choices = random.Random(200)
    alphabet = "kv_0123456789abcdef./\\\x00\n ~"
    made_up = ["".join(choices.choices(alphabet, k=choices.randrange(1, 40))) for _ in range(400)]
    hostile = HOSTILE_NAMES + [name for name in made_up if not names.is_snapshot(name)][: 200 - len(HOSTILE_NAMES)]
    assert len(hostile) == 200
    for name in hostile:
        with pytest.raises(SnapshotRejected, match="bad_name"):
            store.announce(name)
        assert len(str(SnapshotRejected("bad_name", name[:80]))) < 200
    assert fs.calls == []


def test_entries_that_are_no_regular_files_are_refused_without_waiting(make_store, make_rows, tmp_path: Path) -> None:
    """A symbolic link to a good file elsewhere, a FIFO nobody writes to, a folder, a socket, a dangling link."""
    elsewhere = make_store(geometry=GEOMETRY, fingerprint="other")
    good = elsewhere.path / elsewhere.publish(IDS, make_rows(GEOMETRY, N_TOKENS)).name
    store = make_store(geometry=GEOMETRY)
    store.reap()
    entries = [store.path / f"kv_{number:016x}.kv" for number in range(4)]
    link = store.path / good.name
    link.symlink_to(good)
    os.mkfifo(entries[0])
    entries[1].mkdir()
    entries[2].symlink_to(tmp_path / "nowhere")
    listener = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(store.path)  # a socket's path has at most 108 bytes
    try:
        listener.bind(entries[3].name)
    finally:
        os.chdir(here)
    report = store.refresh()
    listener.close()
    assert report.added == ()
    assert store.refused() == dict.fromkeys([entry.name for entry in [*entries, link]], "not_regular_file")
    assert store.find(IDS) is None


def test_a_symbolic_link_under_the_wanted_name_is_not_written_through(make_store, make_rows, tmp_path: Path) -> None:
    store = make_store(geometry=GEOMETRY)
    store.reap()
    target = tmp_path / "precious"
    target.write_text("untouched")
    (store.path / NAME).symlink_to(target)
    with pytest.raises(Exception, match="taken by a file that is refused"):
        store.publish(IDS, make_rows(GEOMETRY, N_TOKENS))
    assert target.read_text() == "untouched"


def test_a_file_that_shrinks_while_it_is_read_is_refused_without_an_end(make_store, make_rows) -> None:
    path: Path | None = None

    def shrink(call: str) -> None:
        if path is not None and call == "preadv":
            os.truncate(path, 700)

    store = make_store(geometry=GEOMETRY, fs=FaultyFileSystem(on_call=shrink))
    info = store.publish(IDS, make_rows(GEOMETRY, N_TOKENS))
    match = store.find(IDS)
    path = store.path / info.name
    with pytest.raises(SnapshotRejected, match="size_mismatch"):
        store.restore(match, N_TOKENS, MemoryRows.empty(GEOMETRY, N_TOKENS))
    assert store.find(IDS) is None


def test_geometry_alone_does_not_let_another_models_snapshot_in(make_store, make_rows) -> None:
    """Promise 6, as far as version 1 carries: eight fingerprints of one geometry, all 56 ordered pairs."""
    fingerprints = [f"{number:032x}" for number in range(8)]
    stores = [make_store(fingerprint=fingerprint, geometry=GEOMETRY) for fingerprint in fingerprints]
    for index, store in enumerate(stores):
        store.publish(IDS + index, make_rows(GEOMETRY, N_TOKENS))
    n_refused = 0
    for reader in stores:
        reader.refresh()
        for index, writer in enumerate(stores):
            match = reader.find(IDS + index, min_tokens=N_TOKENS)
            assert (match is None) == (reader is not writer)
            n_refused += match is None
    assert n_refused == 56
