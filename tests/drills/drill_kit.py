"""`kvferry drill` with a state folder of its own, and what must not be there when it has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from kvferry.drills.journal import STATE_VARIABLE
from kvferry.drills.targets.boards import control_groups

KVFERRY = (sys.executable, "-m", "kvferry.client.cli")
TRIPWIRE = Path(__file__).parents[1] / "system" / "tripwire"


class Drill:
    """Runs `kvferry drill` with a state folder of its own, on a tiny model that is slowed down to be struck."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.runs, self.reports = folder / "runs", folder / "reports"
        orders = folder / "orders"
        orders.write_text(json.dumps({"pace": 0.02}))
        self._model = model
        self._pids: list[int] = []
        self._environment = os.environ | {
            STATE_VARIABLE: str(self.runs),
            "PYTHONPATH": str(TRIPWIRE),
            "KVFERRY_TEST_TRIPWIRE": str(orders),
            "KVFERRY_TLS_DIR": str(folder / "certificates of another cluster"),  # a shell may have them
        }

    def argv(self, name: str, *more: str) -> list[str]:
        where = ("--model", str(self._model), "--report", str(self.reports))
        return [*KVFERRY, "drill", "run", name, *where, *more]

    def run(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        argv = self.argv(name, *more)
        with subprocess.Popen(
            argv, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            self._pids.append(process.pid)
            out, err = process.communicate(timeout=250)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def start(self, name: str, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.argv(name, *more), env=self._environment, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL
        )
        self._pids.append(process.pid)
        return process

    def list(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*KVFERRY, "drill", "list"], env=self._environment, capture_output=True, text=True, check=True
        )

    def nothing_is_left(self) -> bool:
        """No file of a run, no control group, no mount, and no process that has one of its paths in its command."""
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.runs) in line]
        root = control_groups()
        groups = [] if root is None else [group for pid in self._pids for group in root.glob(f"kvferry-*-{pid}")]
        ours = [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(self.runs) in " ".join(process.info["cmdline"] or [])
        ]
        return not (ours or mounts or groups or list(self.runs.iterdir()))


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Until the drill says so."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return
    raise AssertionError("".join(said))


def wait_until_clean(drill: Drill) -> None:
    until = time.monotonic() + 20
    while not drill.nothing_is_left():
        assert time.monotonic() < until, list(drill.runs.rglob("*"))
        time.sleep(0.05)
