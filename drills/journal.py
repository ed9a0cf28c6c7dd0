"""What a drill has done to the world, and how each thing is undone: written down before it is done.

A run has a folder of its own below the state folder: `lock` (held by whoever may change the run: the drill, or after
its death the one who cleans up), `journal/` with one file per thing that is not undone yet, and `work/` for all else.
When the drill is gone and its lock is free, anybody may undo what is left: the drill's own reaper does at once, the
next drill does when that was killed as well.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from kvferry.drills.undo import Undo, UndoFailed, undo, undo_from_json, undo_to_json
from kvferry.trust.files import reason_of

STATE_VARIABLE: Final = "KVFERRY_DRILLS"
"""Where runs are kept, if not in the user's state folder."""

LOCK: Final = "lock"
ENTRIES: Final = "journal"
WORK: Final = "work"
"""In a run's folder."""

REMOVE_S: Final = 10.0
"""For processes that were killed to let go of their last files."""

Say = Callable[[str], None]


def runs_folder() -> Path:
    """Of this user."""
    named = os.environ.get(STATE_VARIABLE)
    return Path(named) if named else platformdirs.user_state_path("kvferry") / "drills"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was done, or is just about to be."""

    number: int
    sentence: str
    undo: Undo


class Journal:
    """Of one run. Not safe for several threads. `undo_all` may be called at any time, also twice and after a crash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures: list[str] = []  # of the latest `finish`: sentences about what could not be undone
        self.work = folder / WORK
        self._entries = folder / ENTRIES
        self._numbers = itertools.count(1)

    @classmethod
    @contextmanager
    def begin(cls, name: str) -> Iterator[Journal]:
        """A new run, locked. At the end, however it ends, everything is undone and the folder goes.

        A reaper in a session of its own, which no Ctrl-C reaches, does the same when this process dies.
        """
        folder = runs_folder() / f"{name}-{os.getpid()}"
        journal = cls(folder)
        with _reaper(folder), _made_and_locked(folder):
            for path in (journal.work, journal._entries):
                path.mkdir(exist_ok=True, mode=0o700)
            try:
                yield journal
            finally:
                journal.finish()

    def write(self, sentence: str, how: Undo) -> Entry:
        """To be called before the thing is done; it is on the disk when this returns."""
        entry = Entry(next(self._numbers), sentence, how)
        path = self._path(entry)
        temp = path.with_suffix(".tmp")
        with temp.open("w") as file:
            json.dump({"sentence": sentence, "undo": undo_to_json(how)}, file)
            file.flush()
            os.fsync(file.fileno())
        temp.rename(path)
        _fsync_folder(self._entries)
        return entry

    def strike_out(self, entry: Entry) -> None:
        """It has been undone by whoever did it."""
        self._path(entry).unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """What is not undone yet, oldest first."""
        found = []
        for path in sorted(self._entries.glob("*.json")):
            with suppress(FileNotFoundError):
                told = json.loads(path.read_text())
                found.append(Entry(int(path.stem), told["sentence"], undo_from_json(told["undo"])))
        return found

    def undo(self, entry: Entry) -> None:
        """Raises UndoFailed, and keeps the entry then."""
        undo(entry.undo)
        self.strike_out(entry)

    def undo_all(self, say: Say | None = None) -> list[str]:
        """Latest first; sentences about what could not be undone, which stays in the journal."""
        failures = []
        for entry in reversed(self.entries()):
            try:
                self.undo(entry)
            except UndoFailed as error:
                failures.append(f"{entry.sentence}: {error}")
            else:
                if say is not None:
                    say(f"undone: {entry.sentence}")
        return failures

    def finish(self, say: Say | None = None) -> list[str]:
        """Undoes everything; the folder goes unless something could not be undone."""
        self.failures = self.undo_all(say)
        if not self.failures:
            _remove(self.folder)
        return self.failures

    def _path(self, entry: Entry) -> Path:
        return self._entries / f"{entry.number:04d}.json"


def clean_up_after_others(say: Say) -> list[str]:
    """Undoes what drills that are gone left behind; sentences about what could not be undone."""
    failures = []
    folder = runs_folder()
    for run in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            if _is_run(run):
                failures += _clean_up_if_dead(run, say)
        except FileNotFoundError:  # its own drill, or its reaper, has just removed it
            continue
        except OSError as error:  # another user's, who ran a drill with our environment
            failures.append(f"the drill {run.name}: {run} cannot be used ({reason_of(error)})")
    return failures


def _is_run(folder: Path) -> bool:
    """Somebody may have named a folder that holds other things as well: those are not ours to remove."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK, ENTRIES, WORK}


def _clean_up_if_dead(run: Path, say: Say) -> list[str]:
    with suppress(BlockingIOError), _locked(run, wait=False):
        say(f"cleaning up after the drill {run.name}, which was killed")
        return Journal(run).finish(say)
    return []


def clean_up_after(folder: Path, say: Say) -> list[str]:
    """Undoes what one run left, once it is over; nothing when it cleaned up itself."""
    with suppress(FileNotFoundError), _locked(folder, wait=True):
        return Journal(folder).finish(say)
    return []


@contextmanager
def _reaper(folder: Path) -> Iterator[None]:
    """See reaper.py. It is told by the end of a pipe, waits for the lock, and finds nothing after an orderly run."""
    command = [sys.executable, "-m", "kvferry.drills.reaper", str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None  # noqa: S101 - it was asked for
    try:
        yield
    finally:  # not Popen's own context, which waits a quarter of a second at most after a Ctrl-C
        process.stdin.close()
        process.wait()


@contextmanager
def _made_and_locked(folder: Path) -> Iterator[None]:
    """A run's folder. Who cleans up after others may find it before it is locked, and take it away as a dead one's."""
    with ExitStack() as held:
        while True:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                held.enter_context(_locked(folder, wait=True))
                break
        yield


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Raises BlockingIOError when somebody else has it, FileNotFoundError when the run is gone."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not (folder / LOCK).exists():
            raise FileNotFoundError(folder)
        yield
    finally:
        os.close(fd)


def _remove(folder: Path) -> None:
    """The lock last: as long as there is anything, it is known that it has to go."""
    until = time.monotonic() + REMOVE_S
    rest = (folder / WORK, folder / ENTRIES)
    while any(path.exists() for path in rest):
        for path in rest:
            shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > until:
            return
    shutil.rmtree(folder, ignore_errors=True)


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
