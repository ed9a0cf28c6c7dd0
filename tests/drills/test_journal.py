"""What a drill did is undone however it ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drills import journal as journal_module
from kvferry.drills import undo as undo_module
from kvferry.drills.journal import STATE_VARIABLE, Journal, clean_up_after_others
from kvferry.drills.undo import (
    RemoveFile,
    RemoveGroup,
    RunCommand,
    SignalProcess,
    Undo,
    UndoFailed,
    Unmount,
    undo,
    undo_from_json,
    undo_to_json,
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setenv(STATE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_what_is_left_open_is_undone_at_the_end_latest_first(runs: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with Journal.begin("test") as journal:
        for name in ("first", "second"):
            (tmp_path / name).touch()
            journal.write(name, RemoveFile(str(tmp_path / name)))
        assert [entry.sentence for entry in journal.entries()] == ["first", "second"]
        assert journal.undo_all(said.append) == []
    assert said == ["undone: second", "undone: first"]
    assert not (tmp_path / "first").exists()
    assert list(runs.iterdir()) == []


def test_an_exception_undoes_it_as_well(runs: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"

    def interrupted() -> None:
        with Journal.begin("test") as journal:
            victim.touch()
            journal.write("victim", RemoveFile(str(victim)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not victim.exists()
    assert list(runs.iterdir()) == []


def test_what_cannot_be_undone_is_told_and_stays_written_down(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with Journal.begin("test") as journal:
        journal.write("a folder", RemoveFile(str(tmp_path / "folder")))
        (failure,) = journal.undo_all()
        assert "a folder" in failure
    assert [entry.sentence for entry in Journal(next(runs.iterdir())).entries()] == ["a folder"]
    (tmp_path / "folder").rmdir()
    assert clean_up_after_others(lambda _line: None) == []
    assert list(runs.iterdir()) == []


def test_a_drill_begins_though_another_one_that_begins_takes_its_empty_folder_for_a_dead_one_s(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = journal_module._locked

    @contextmanager
    def be_overtaken(folder: Path, *, wait: bool) -> Iterator[None]:
        monkeypatch.setattr(journal_module, "_locked", locked)
        assert clean_up_after_others(lambda _line: None) == []
        with locked(folder, wait=wait):
            yield

    monkeypatch.setattr(journal_module, "_locked", be_overtaken)
    with Journal.begin("test") as journal:
        assert journal.work.is_dir()
    assert list(runs.iterdir()) == []


KILLED_DRILL = """
import os, signal, sys, time
from kvferry.drills.journal import Journal
from kvferry.drills.undo import RemoveFile
with Journal.begin("killed") as journal:
    open(sys.argv[1], "w").close()
    journal.write("a file", RemoveFile(sys.argv[1]))
    print(journal.folder, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_after_a_drill_was_killed_its_reaper_undoes_everything(
    runs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    victim = tmp_path / "victim"
    with subprocess.Popen([sys.executable, "-c", KILLED_DRILL, str(victim)], stdout=subprocess.PIPE) as drill:
        assert drill.stdout is not None
        drill.stdout.readline()
        assert victim.exists()
        drill.send_signal(number)
    wait_until_gone(victim)
    wait_until_gone(runs / next(iter(runs.iterdir()), runs / "none"))
    assert not victim.exists()
    assert list(runs.iterdir()) == []


def test_when_the_reaper_was_killed_too_the_next_drill_cleans_up_and_says_so(runs: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    with subprocess.Popen([sys.executable, "-c", KILLED_DRILL, str(victim)], stdout=subprocess.PIPE) as drill:
        assert drill.stdout is not None
        folder = Path(drill.stdout.readline().decode().strip())
        said: list[str] = []
        clean_up_after_others(said.append)
        assert (said, victim.exists()) == ([], True)  # it is at work, and left alone
        children = Path(f"/proc/{drill.pid}/task/{drill.pid}/children").read_text().split()
        for pid in (*map(int, children), drill.pid):
            os.kill(pid, signal.SIGKILL)
    assert victim.exists()
    assert clean_up_after_others(said.append) == []
    assert said[0].startswith(f"cleaning up after the drill {folder.name}")
    assert "undone: a file" in said
    assert not victim.exists()
    assert list(runs.iterdir()) == []


def test_a_file_among_the_runs_is_no_run(runs: Path) -> None:
    runs.mkdir()
    (runs / "notes").write_text("mine")
    said: list[str] = []
    assert clean_up_after_others(said.append) == []
    assert (said, (runs / "notes").read_text()) == ([], "mine")


def test_a_folder_that_holds_other_things_is_no_run(runs: Path) -> None:
    """Whoever names his home as the place for runs keeps what is in it."""
    photos = runs / "photos"
    photos.mkdir(parents=True)
    (photos / "ferry.jpg").touch()
    assert clean_up_after_others(lambda _line: None) == []
    assert (photos / "ferry.jpg").exists()


def test_a_run_that_may_not_be_touched_is_told_and_hinders_no_other(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = journal_module._locked

    @contextmanager
    def refuse(folder: Path, *, wait: bool) -> Iterator[None]:
        if folder.name == "of-root":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder / "lock"))
        with locked(folder, wait=wait):
            yield

    monkeypatch.setattr(journal_module, "_locked", refuse)
    for name in ("of-root", "ours"):
        (runs / name).mkdir(parents=True)
    (failure,) = clean_up_after_others(lambda _line: None)
    assert failure == f"the drill of-root: {runs / 'of-root'} cannot be used (permission denied)"
    assert [run.name for run in runs.iterdir()] == ["of-root"]


def test_a_process_is_ended_even_when_it_is_frozen_and_no_other_one_of_its_number(
    sleeper: subprocess.Popen[bytes],
) -> None:
    how = SignalProcess.to(sleeper.pid, signal.SIGKILL)
    undo(SignalProcess(how.pid, f"{how.started}0", how.number))  # that one has ended, ours has its number now
    assert sleeper.poll() is None
    sleeper.send_signal(signal.SIGSTOP)
    undo(how)
    assert sleeper.wait(5) == -signal.SIGKILL
    undo(how)  # once more does no harm


def test_a_process_is_known_again_when_somebody_has_set_the_clock(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drill that was killed may be cleaned up after hours, on a board that has heard the time since."""
    how = SignalProcess.to(sleeper.pid, signal.SIGKILL)
    boot = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 3600)
    sleeper.send_signal(signal.SIGSTOP)
    undo(how)
    assert sleeper.wait(5) == -signal.SIGKILL


def test_undoing_in_vain_does_no_harm(tmp_path: Path) -> None:
    for how in (RemoveFile(f"{tmp_path}/no"), RemoveGroup(f"{tmp_path}/no"), Unmount(str(tmp_path))):
        undo(how)
    with pytest.raises(UndoFailed, match="false"):
        undo(RunCommand(("false",)))


def test_a_mount_is_known_whatever_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's table has blanks as numbers."""
    place, asked = tmp_path / "my Fähre\\store", tmp_path / "asked"
    word = str(place).replace("\\", r"\134").replace(" ", r"\040")
    (tmp_path / "mountinfo").write_text(f"36 35 98:0 / {word} rw,noatime - tmpfs kvferry rw\n")
    monkeypatch.setattr(undo_module, "MOUNTS", tmp_path / "mountinfo")
    umount = tmp_path / "umount"
    umount.write_text(f'#!/bin/sh\nprintf %s "$2" > "{asked}"\n')
    umount.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    undo(Unmount(str(place)))
    assert asked.read_text() == str(place)


processes = st.builds(SignalProcess, st.integers(1, 1 << 22), st.text(), st.sampled_from([9, 15, 18]))
undos = st.one_of(
    processes,
    st.builds(RemoveGroup, st.text()),
    st.builds(RemoveFile, st.text()),
    st.builds(Unmount, st.text(), st.none() | processes),
    st.builds(RunCommand, st.lists(st.text()).map(tuple)),
)


@given(undos)
def test_every_way_of_undoing_survives_the_journal(how: Undo) -> None:
    assert undo_from_json(undo_to_json(how)) == how


def wait_until_gone(path: Path) -> None:
    until = time.monotonic() + 20
    while path.exists() and time.monotonic() < until:
        time.sleep(0.02)
