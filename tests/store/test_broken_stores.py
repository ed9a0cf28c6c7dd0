"""The commands on stores that are not what they should be: foreign files, folders that cannot be read, a disk that
fails in the middle, Ctrl-C. One sentence each, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvferry.store import names
from kvferry.store.cli import kv
from kvferry.store.commands import checking
from kvferry.store.commands.shared import operator_id
from kvferry.store.errors import SnapshotGone, StoreUnavailable
from kvferry.store.folder import FileView
from kvferry.store.fs import FileSystem, PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.pace import Pace
from kvferry.store.place import StorePlace
from kvferry.store.segment_file import BlockDamagedError
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(2, 2, 8)
IDS = np.arange(1, 201, dtype=np.int32)
K = np.random.default_rng(2).standard_normal((2, 200, 16), np.float32)
NEW_CONVERSATION = np.full(40, 7, np.int32)
UNREADABLE = 40


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(kv, [str(argument) for argument in arguments])


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """Two segments, 0-79 and 80-199, and one of another conversation, all older than any grace period."""
    store = SnapshotStore(tmp_path / "store", "feed", GEOMETRY, 1024, 1 << 30, 2000, "node-1", version=3)
    for ids in (IDS[:80], IDS, NEW_CONVERSATION):
        name = store.publish(ids, MemoryRows(K, -K)).name
        os.utime(store.path / name, (1, 1))
    return store


def segment(store: SnapshotStore, start: int, n_tokens: int) -> Path:
    for path in store.path.glob("kv3_*"):
        head = path.read_bytes()
        if (int.from_bytes(head[44:48], "little"), int.from_bytes(head[24:28], "little")) == (start, n_tokens):
            return path
    raise AssertionError


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)


class Failing:
    """Makes the disk refuse one path, and what lies in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, call: str, path: Path, code: int = errno.EIO) -> None:
        real = getattr(PosixFileSystem, call)

        def failing(fs: PosixFileSystem, asked: str, *rest: object) -> object:
            if asked == str(path) or asked.startswith(f"{path}/"):
                raise OSError(code, os.strerror(code))
            return real(fs, asked, *rest)

        self._monkeypatch.setattr(PosixFileSystem, call, failing)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def test_what_follows_a_file_that_cannot_be_read_is_not_taken_for_forgotten(
    store: SnapshotStore, failing: Failing
) -> None:
    """A disk's error of a moment would cost the conversation otherwise: its later segments seem to wait, for ever."""
    parent = segment(store, 0, 80)
    failing("open_read", parent)
    result = run("gc", store.path.parent)
    assert result.exit_code == UNREADABLE
    assert f"no segment is removed while {parent} cannot be read" in result.stderr
    assert len(list(store.path.glob("kv3_*"))) == 3


def test_nothing_is_removed_beside_a_file_that_cannot_be_read(store: SnapshotStore, failing: Failing) -> None:
    """It may continue what would go."""
    failing("open_read", segment(store, 80, 120))
    result = run("rm", store.path.parent, "--tokens", ",".join(map(str, IDS)))
    assert result.exit_code == UNREADABLE
    assert len(list(store.path.glob("kv3_*"))) == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_listed_is_told_and_the_others_are_worked_on(
    store: SnapshotStore, failing: Failing, code: int
) -> None:
    closed = store.path.parent / "closed"
    shutil.copytree(store.path, closed)
    rot(segment(store, 0, 80))
    failing("names", closed, code)
    for command, exit_code in (("ls", UNREADABLE), ("du", UNREADABLE), ("fsck", 3), ("scrub", 3), ("gc", UNREADABLE)):
        result = run(command, store.path.parent)
        assert result.exit_code == exit_code, command
        assert f"cannot list {closed}" in result.stderr
    assert len(list((store.path / "quarantine").iterdir())) == 1


def test_a_file_whose_rows_the_disk_does_not_give_is_told_and_stays(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = segment(store, 0, 80)
    inode, real = victim.stat().st_ino, PosixFileSystem.preadv

    def preadv(fs: PosixFileSystem, fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(fd).st_ino == inode and 3000 < offset < 15000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fs, fd, buffers, offset)

    monkeypatch.setattr(PosixFileSystem, "preadv", preadv)
    for command in ("fsck", "scrub"):
        result = run(command, store.path.parent)
        assert result.exit_code == 3
        assert "unreadable: cannot read" in result.output
    assert victim.exists()


@pytest.mark.parametrize("command", [("scrub",), ("fsck", "--repair")])
def test_an_interrupted_check_keeps_what_it_found_and_says_so(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    first, *_, last = sorted(store.path.glob("kv3_*"))
    rot(first)
    real = Pace.read

    def read(pace: Pace, n_bytes: int) -> None:
        real(pace, n_bytes)
        if pace.n_bytes > first.stat().st_size * 1.1 if first.exists() else True:
            raise KeyboardInterrupt

    monkeypatch.setattr(Pace, "read", read)
    result = run(command[0], store.path.parent, *command[1:])
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "quarantined" in result.stdout
    assert (first.exists(), last.exists()) == (False, True)
    assert not list(store.path.glob("*.tmp"))


@pytest.mark.parametrize("command", [("scrub",), ("fsck", "--repair")])
def test_a_check_leaves_what_a_node_set_aside_and_saved_again_before_it_could(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    victim = segment(store, 0, 80)
    rot(victim)
    node = SnapshotStore(tmp_path / "store", "feed", GEOMETRY, 1024, 1 << 30, 2000, "node-2", version=3)
    real = checking.read_rows_of

    def read_slowly(fs: FileSystem, view: FileView, *more: Any) -> list[BlockDamagedError]:
        damages = real(fs, view, *more)
        if view.path == victim:
            victim.rename(tmp_path / "set aside by the node")
            assert tmp_path / "store" / "feed" / node.publish(IDS[:80], MemoryRows(K, -K)).name == victim
        return damages

    monkeypatch.setattr(checking, "read_rows_of", read_slowly)
    assert run(command[0], store.path.parent, *command[1:]).exit_code == 3
    assert victim.exists()
    monkeypatch.undo()
    assert run("fsck", store.path.parent).exit_code == 0


def test_folders_and_files_of_others_are_left_alone(store: SnapshotStore) -> None:
    root = store.path.parent
    for name in ("lost+found", "notes", "a\nb", ".hidden", "trash2"):
        (root / name).mkdir()
        (root / name / "file\nwith lines").write_text("mine")
    (root / "kv_0123456789abcdef.kv\n").write_text("mine")
    (root / "README").write_text("mine")
    before = sorted(str(path) for path in root.rglob("*"))
    for command in ("ls", "fsck", "scrub", "gc", "du"):
        result = run(command, root)
        assert result.exit_code == 0, command
        assert "\nb" not in result.output
    assert sorted(str(path) for path in root.rglob("*")) == before


def test_entries_that_are_no_files_are_told_by_name_and_stay(store: SnapshotStore) -> None:
    (store.path / f"kv3_{1:032x}.kv").mkdir()
    os.mkfifo(store.path / f"kv3_{2:032x}.kv")
    (store.path / f"kv_{3:016x}.kv").symlink_to("/etc/passwd")
    (store.path / f"kv_{4:016x}.kv").write_bytes(os.urandom(5000))
    (store.path / f"kv3_{5:032x}.kv").write_bytes(b"")
    problems = json.loads(run("fsck", store.path.parent, "--json").stdout)["problems"]
    found = {Path(problem["file"]).name: problem["problem"] for problem in problems}
    assert found == {
        f"kv3_{1:032x}.kv": "not_regular_file",
        f"kv3_{2:032x}.kv": "not_regular_file",
        f"kv_{3:016x}.kv": "not_regular_file",
        f"kv_{4:016x}.kv": "bad_magic",
        f"kv3_{5:032x}.kv": "truncated_header",
    }
    assert run("fsck", store.path.parent, "--repair").exit_code == 3
    assert len(list((store.path / "quarantine").iterdir())) == 2


def test_a_conversion_does_not_pass_off_a_damaged_file_as_its_own(store: SnapshotStore, tmp_path: Path) -> None:
    source, output = segment(store, 80, 120), tmp_path / "out"
    output.mkdir()
    assert run("convert", source, "--to", "3", "--output", output).exit_code == 0
    (made,) = output.iterdir()
    good = made.read_bytes()
    assert run("convert", source, "--to", "3", "--output", output).exit_code == 0  # the same again is no error
    rot(made)
    result = run("convert", source, "--to", "3", "--output", output)
    assert "is there already and is refused (block_digest_mismatch)" in str(result.exception)
    made.unlink()
    assert run("convert", source, "--to", "3", "--output", output).exit_code == 0
    assert made.read_bytes() == good
    assert [path.name for path in output.iterdir()] == [made.name]


def test_an_interrupted_conversion_leaves_nothing(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    output.mkdir()

    def interrupt(fs: PosixFileSystem, fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PosixFileSystem, "fsync", interrupt)
    assert run("convert", segment(store, 80, 120), "--to", "1", "--output", output).exit_code != 0
    assert list(output.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_and_the_others_are_cleaned(
    store: SnapshotStore, failing: Failing, tmp_path: Path
) -> None:
    other = tmp_path / "store" / "aaaa"
    shutil.copytree(store.path, other)
    for path in (*other.glob("*.kv"), *store.path.glob("*.kv")):
        failing("rename", path, errno.EROFS) if path.parent == other else os.utime(path, (1, 1))
    result = run("rm", tmp_path / "store", "--tokens", ",".join(map(str, IDS)), "--json")
    assert result.exit_code == UNREADABLE
    assert len(json.loads(result.stdout)["removed"]) == 2, result.output
    assert str(other) in result.stderr
    assert [path.name for path in store.path.glob("*.kv")] == [segment(store, 0, 40).name]

    failing("create", other, errno.EROFS)  # every file in it
    orphan = segment_of_nobody(store)
    result = run("gc", tmp_path / "store", "--json")
    assert result.exit_code == UNREADABLE
    assert json.loads(result.stdout)["orphans"] == 1
    assert not orphan.exists()


def segment_of_nobody(store: SnapshotStore) -> Path:
    """A day-old segment whose beginning is gone."""
    for ids in (IDS[:80], IDS):
        path = store.path / store.publish(ids, MemoryRows(K, -K)).name
        os.utime(path, (1, 1))
    segment(store, 0, 80).unlink()
    return path


def test_a_file_that_may_not_be_read_is_an_unreadable_store_for_every_command(
    store: SnapshotStore, failing: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = segment(store, 0, 80)
    failing("open_read", path, errno.EACCES)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # as click asks; the tests' user may be root
    for arguments in (
        ["verify", path],
        ["inspect", path],
        ["dump", path, "--output", tmp_path / "x"],
        ["diff", path, path],
    ):
        result = run(*arguments)
        assert isinstance(result.exception, StoreUnavailable), (arguments, result.output)


def test_a_segment_that_is_not_there_is_gone_and_waits_for_nothing(store: SnapshotStore, tmp_path: Path) -> None:
    missing = store.path / f"kv3_{'0' * 32}.kv"
    for arguments in (["dump", missing, "--output", tmp_path / "x"], ["diff", missing, missing]):
        assert isinstance(run(*arguments).exception, SnapshotGone)


@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_an_objects_address_is_no_file(command: str) -> None:
    result = run(command, *[f"s3://bucket/store/feed/kv3_{'0' * 32}.kv"] * (1 + (command == "diff")))
    assert result.exit_code == 2
    assert "is no file of this machine" in result.stderr


def test_a_scrub_tells_what_it_could_not_judge(store: SnapshotStore, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    arguments = ("scrub", tmp_path / "store", "--store-key-file", key)
    result = run(*arguments)
    assert result.exit_code == 3
    assert "3 files not read (key_mismatch)" in result.output
    result = run(*arguments, "--json")
    assert json.loads(result.stdout)["refused"] == {"key_mismatch": 3}
    assert len(list(store.path.glob("*.kv"))) == 3


def test_two_conversations_without_a_common_beginning_have_no_rows_to_compare(store: SnapshotStore) -> None:
    result = run("diff", segment(store, 0, 80), segment(store, 0, 40))
    assert result.exit_code == 3, result.output
    assert "the first 0 are the same" in result.output
    assert json.loads(run("diff", segment(store, 0, 80), segment(store, 0, 40), "--json").stdout)["same"] is False


def test_a_missing_file_of_tokens_is_no_snapshot(store: SnapshotStore, tmp_path: Path) -> None:
    result = run("lcp", tmp_path / "store", "--tokens", f"@{tmp_path}/none")
    assert "the token ids" in str(result.exception)
    assert "recomputed" not in str(result.exception)


def test_names_in_a_piped_table_are_whole(store: SnapshotStore, tmp_path: Path) -> None:
    folder = tmp_path / "store" / ("f" * 64)
    shutil.copytree(store.path, folder)
    (folder / segment(store, 0, 80).name).unlink()
    listed = run("ls", tmp_path / "store").stdout
    for path in folder.glob("*.kv"):
        assert f"{folder.name}/{path.name}" in listed


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_repair_keeps_the_good_rows_of_a_tenants_sealed_segment(tmp_path: Path, tenant: str) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    seal = StorePlace("", key).seal()
    store = SnapshotStore(
        tmp_path / "store", "feed", GEOMETRY, 1024, 1 << 30, 2000, "node-1", version=3, seal=seal, tenant=tenant
    )
    path = store.path / store.publish(IDS, MemoryRows(K, -K)).name
    for command in ("inspect", "verify"):
        assert run(command, path, "--store-key-file", key).exit_code == 0, command
    data = bytearray(path.read_bytes())
    data[320 + 4 * len(IDS) + 100 * GEOMETRY.kv_dim * 8] ^= 1  # position 100 of the first layer
    path.write_bytes(data)
    result = run("fsck", tmp_path / "store", "--repair", "--store-key-file", key)
    assert "rows up to 95 are in" in result.output, result.output
    store.refresh()
    match = store.find(IDS)
    assert match is not None
    assert match.n_common == 96


def test_cleaning_leaves_what_another_command_is_writing(store: SnapshotStore, tmp_path: Path) -> None:
    temp = store.path / names.temp_name(segment(store, 0, 80).name, operator_id(), "0" * 32, 0)
    temp.touch()
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from kvferry.store.cli import kv; kv()", "gc", str(tmp_path / "store")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "nothing to remove" in done.stdout
    assert temp.exists()
