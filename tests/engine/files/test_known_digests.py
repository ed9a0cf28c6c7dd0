"""A digest is remembered for the very bytes that were hashed, and for nothing else."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvferry.engine.files import known_digests
from kvferry.engine.files.known_digests import hashed_sha256, remembered_sha256


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    return path


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_digests, "_SETTLED_NS", -1)


def test_a_file_that_is_as_it_was_hashed_is_not_hashed_again(file: Path, monkeypatch) -> None:
    later(monkeypatch)
    assert remembered_sha256(file) is None
    assert hashed_sha256(file) == hashlib.sha256(b"weights").hexdigest() == remembered_sha256(file)


def test_a_file_that_was_just_written_is_not_remembered(file: Path) -> None:
    hashed_sha256(file)
    assert remembered_sha256(file) is None


def wait_for_another_time(file: Path) -> None:
    """The clock of a file system may go on by a hundredth of a second at once."""
    probe = file.with_name("probe")
    probe.touch()
    while probe.stat().st_ctime_ns <= file.stat().st_ctime_ns:
        probe.touch()


@pytest.mark.parametrize("keeps_its_time", [False, True])
def test_a_file_that_was_written_to_is_another(file: Path, monkeypatch, keeps_its_time: bool) -> None:
    later(monkeypatch)
    hashed_sha256(file)
    before = file.stat()
    wait_for_another_time(file)
    with file.open("r+b") as out:
        out.write(b"WEIGHTS")
    if keeps_its_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert remembered_sha256(file) is None


def test_a_file_that_was_replaced_is_another(file: Path, monkeypatch) -> None:
    later(monkeypatch)
    hashed_sha256(file)
    other = file.with_name("other")
    other.write_bytes(b"weightz")
    other.replace(file)
    assert remembered_sha256(file) is None


def test_a_record_that_cannot_be_read_counts_for_nothing(file: Path, monkeypatch, tmp_path: Path) -> None:
    later(monkeypatch)
    hashed_sha256(file)
    (record,) = (tmp_path / "cache/digests").iterdir()
    for body in (b"", b"[", b"[]", b'{"state": 3}', b"\xff"):
        record.write_bytes(body)
        assert remembered_sha256(file) is None
    assert hashed_sha256(file) == remembered_sha256(file)


def test_a_cache_that_cannot_be_written_is_done_without(file: Path, monkeypatch, tmp_path: Path) -> None:
    later(monkeypatch)
    (tmp_path / "cache").write_text("in the way")
    assert hashed_sha256(file) == hashlib.sha256(b"weights").hexdigest()
    assert remembered_sha256(file) is None
