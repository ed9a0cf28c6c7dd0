"""A folder in user space that can hang, as a network file system does when its server is gone, and be full.

Where the machine has FUSE and the package `mfusepy`; root is not needed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from kvferry.drills.errors import DrillImpossible
from kvferry.drills.journal import Journal
from kvferry.drills.undo import SignalProcess, Unmount

MOUNT_S: Final = 15.0


def why_no_fuse() -> str | None:
    """The reason why this machine cannot, or None."""
    if importlib.util.find_spec("mfusepy") is None:
        return "the Python package mfusepy is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse that we may use"
    if os.geteuid() != 0 and not (shutil.which("fusermount3") or shutil.which("fusermount")):
        return "fusermount3 is not installed"
    return None


class FuseFolder:
    """Mounted over `folder` when it is made; what is in it lies beside it. Goes with its journal."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._full = folder.with_name("store-is-full")
        behind = folder.with_name("behind-the-store")
        for path in (folder, behind):
            path.mkdir(mode=0o700, exist_ok=True)
        entry = journal.write(f"a folder is mounted at {folder}", Unmount(str(folder)))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "kvferry.drills.targets.fuse_server", str(behind), str(folder), str(self._full)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        server = SignalProcess.to(self._server.pid, signal.SIGKILL)
        journal.write(f"a folder is mounted at {folder}, by process {server.pid}", Unmount(str(folder), server))
        journal.strike_out(entry)
        until = time.monotonic() + MOUNT_S
        while not folder.is_mount():
            if time.monotonic() > until or self._server.poll() is not None:
                raise DrillImpossible(f"No folder could be mounted at {folder}.")
            time.sleep(0.02)

    def hang(self) -> None:
        """No call returns. In the journal its server is a process to be killed already, which frees who waits."""
        self._server.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        """Calls return again, also those that wait."""
        self._server.send_signal(signal.SIGCONT)

    def fill(self) -> None:
        """Every write fails for lack of room."""
        self._full.touch()

    def make_room(self) -> None:
        """Writes succeed again."""
        self._full.unlink(missing_ok=True)
