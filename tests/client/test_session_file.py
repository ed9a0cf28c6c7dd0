"""A session's file is read whole and right, or refused with one sentence, whatever it says of itself."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.client.errors import InvalidImport
from kvferry.client.session_file import CHUNK_BYTES, read_session_file, write_session_file


@pytest.fixture
def written(tmp_path: Path) -> Path:
    rows = []
    for folder, name, data in (("aa", "one.kv", b"1" * (CHUNK_BYTES + 3)), ("bb", "two.kv", b"")):
        (tmp_path / folder).mkdir()
        rows.append(tmp_path / folder / name)
        rows[-1].write_bytes(data)
    rows.append(tmp_path / "aa" / "gone.kv")
    assert write_session_file(tmp_path / "s.kvs", b"session", rows) == 2
    return tmp_path / "s.kvs"


def test_what_was_written_is_read(written: Path) -> None:
    found = read_session_file(written)
    assert found.session == b"session"
    assert [(r.folder, r.name, b"".join(found.chunks(r))) for r in found.rows] == [
        ("aa", "one.kv", b"1" * (CHUNK_BYTES + 3)),
        ("bb", "two.kv", b""),
    ]
    assert sorted(p.name for p in written.parent.iterdir()) == ["aa", "bb", "s.kvs"]


def test_every_cut_is_refused(tmp_path: Path) -> None:
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / "one.kv").write_bytes(b"rows")
    whole = tmp_path / "s.kvs"
    write_session_file(whole, b"session", [tmp_path / "aa" / "one.kv"])
    data = whole.read_bytes()
    for n in range(len(data)):
        whole.write_bytes(data[:n])
        with pytest.raises(InvalidImport):
            read_session_file(whole)
    for n in range(len(data)):
        whole.write_bytes(data[:n] + bytes([data[n] ^ 0x41]) + data[n + 1 :])
        with pytest.raises(InvalidImport):
            read_session_file(whole)


def signed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\x03\x04" * 20, "no session that was exported"),
        (signed(struct.pack("<8sII", b"KVFERRYS", 2, 0) + b"\0"), "version 2, and this program reads version 1"),
        (signed(struct.pack("<8sII", b"KVFERRYS", 1, 2**32 - 1) + b"\0"), "4,294,967,295 bytes"),
        (signed(struct.pack("<8sII", b"KVFERRYS", 1, 0) + b"\1a\1b" + struct.pack("<Q", 2**63)), "cut or damaged"),
        (signed(struct.pack("<8sII", b"KVFERRYS", 1, 0) + b"\1\xff"), "a name in it is none"),
        (signed(struct.pack("<8sII", b"KVFERRYS", 1, 0) + b"\0") + b"more", "there is more after its end"),
    ],
    ids=["another kind", "newer", "session too long", "rows too long", "name", "more"],
)
def test_hostile_files_are_refused_with_a_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    file = tmp_path / "s.kvs"
    file.write_bytes(data)
    with pytest.raises(InvalidImport, match=says):
        read_session_file(file)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidImport, match="cannot be read: no such file"):
        read_session_file(tmp_path / "nowhere")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Callable[..., object]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvferry.terminal.output_file.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_session_file(tmp_path / "s.kvs", b"session", [])
    assert list(tmp_path.iterdir()) == []
