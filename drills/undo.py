"""The few ways in which things are undone. Each is data, does no harm when done twice or in vain, and never mistakes a
process or a file for another one that took its number or its name since."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil

GROUP_S: Final = 20.0
"""For a killed control group to become empty: at once, save for processes inside an uninterruptible disk wait."""

COMMAND_S: Final = 180.0

MOUNTS: Final = Path("/proc/self/mountinfo")


class UndoFailed(Exception):
    """It is as it was; the sentence says why."""


@dataclass(frozen=True, slots=True)
class SignalProcess:
    """Thaws, or ends, one process: that which was started at this time."""

    pid: int
    started: str
    number: int

    @classmethod
    def to(cls, pid: int, number: signal.Signals) -> Self:
        """For a process that runs."""
        return cls(pid, _started(pid), int(number))

    def run(self) -> None:
        try:
            process = psutil.Process(self.pid)
            if _started(self.pid) == self.started:
                process.send_signal(self.number)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            pass
        except psutil.AccessDenied as error:
            raise UndoFailed(f"process {self.pid} is not ours to signal") from error


@dataclass(frozen=True, slots=True)
class RemoveGroup:
    """Kills everything in a control group (version 2), frozen or not, and removes it with all groups below.

    What its processes alone held ends with them: network and mount namespaces, cables, mounts.
    """

    path: str

    def run(self) -> None:
        group = Path(self.path)
        if not group.is_dir():
            return
        try:
            (group / "cgroup.kill").write_text("1")
        except OSError as error:
            raise UndoFailed(f"{group} cannot be killed: {error.strerror}") from error
        until = time.monotonic() + GROUP_S
        while group.is_dir():
            for path, _, _ in os.walk(group, topdown=False):
                try:
                    Path(path).rmdir()
                except OSError:  # its last process is on its way out
                    break
            if time.monotonic() > until:
                raise UndoFailed(f"{group} still has processes after {GROUP_S:.0f} s")
            time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Unmount:
    """Takes a mount off, if it is one, after killing the process that served it."""

    path: str
    server: SignalProcess | None = None

    def run(self) -> None:
        if self.server is not None:
            self.server.run()
        if not _is_mount(self.path):
            return
        tries = [["umount", "-l", self.path], ["fusermount3", "-uz", self.path], ["fusermount", "-uz", self.path]]
        for argv in tries:
            try:
                subprocess.run(argv, capture_output=True, timeout=GROUP_S, check=True)
            except (OSError, subprocess.SubprocessError):
                continue
            return
        raise UndoFailed(f"{self.path} cannot be unmounted")


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """A file that took up room."""

    path: str

    def run(self) -> None:
        try:
            Path(self.path).unlink(missing_ok=True)
        except OSError as error:
            raise UndoFailed(f"{self.path} cannot be removed: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class RunCommand:
    """For what only another program can undo, such as ansible on boards."""

    argv: tuple[str, ...]

    def run(self) -> None:
        try:
            subprocess.run(self.argv, capture_output=True, text=True, timeout=COMMAND_S, check=True)
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout).strip().splitlines()[-1:]
            raise UndoFailed(f"{self.argv[0]} failed: {' '.join(said)}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UndoFailed(f"{self.argv[0]} failed: {error}") from error


Undo = SignalProcess | RemoveGroup | Unmount | RemoveFile | RunCommand

_KINDS: Final[dict[str, Callable[..., Undo]]] = {
    kind.__name__: kind for kind in (SignalProcess, RemoveGroup, Unmount, RemoveFile, RunCommand)
}


def undo(how: Undo) -> None:
    """Raises UndoFailed."""
    how.run()


def undo_to_json(how: Undo) -> dict[str, Any]:
    """For the journal."""
    return {"kind": type(how).__name__, **asdict(how)}


def undo_from_json(told: dict[str, Any]) -> Undo:
    """What undo_to_json made."""
    fields = {name: value for name, value in told.items() if name != "kind"}
    if fields.get("server") is not None:
        fields["server"] = SignalProcess(**fields["server"])
    if "argv" in fields:
        fields["argv"] = tuple(fields["argv"])
    return _KINDS[told["kind"]](**fields)


def _started(pid: int) -> str:
    """The machine's boot, and the ticks since then: not the time of day, which is another one once the clock is set.

    Raises FileNotFoundError, ProcessLookupError.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]  # its name may hold anything
    return f"{boot} {fields.split()[19]}"


def _is_mount(path: str) -> bool:
    """By the kernel's own table: asking the path itself would hang with a file system that hangs."""
    return os.fsencode(path) in {_unescaped(line.split()[4]) for line in MOUNTS.read_bytes().splitlines()}


def _unescaped(word: bytes) -> bytes:
    """The kernel writes blanks and backslashes as their numbers: \\040."""
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), word)
