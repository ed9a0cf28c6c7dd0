"""One process of a local cluster: started, watched, signalled and ended by the pid we got when we started it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvferry.drills.disk import reason_of, why_full
from kvferry.drills.errors import ProcessFailed
from kvferry.trust.bearer import TOKEN_VARIABLE
from kvferry.trust.options import TLS_DIR_VARIABLE

READY_S: Final = 300.0
"""A node compiles its kernels at its first start ever: a minute on a busy laptop, several on a slow board."""

STOP_S: Final = 35.0
"""A node drains and saves within 30 s, in practice within one; then it is ended by force."""

KILL_S: Final = 10.0
"""SIGKILL works at once, save for a process inside an uninterruptible disk wait."""

POLL_S: Final = 0.02

_NOT_INHERITED: Final = frozenset({TLS_DIR_VARIABLE, TOKEN_VARIABLE})
"""Who a person is to another cluster. What certificate a process of this one shows is said in its arguments."""

LOG_BYTES_MAX: Final = 1 << 20
"""How much of a log is read to find out why its process ended."""


@dataclass
class ManagedProcess:
    """`arguments` follow `kvferry`; the process writes `ready_file` when it serves; its stderr goes to `log_file`.

    `within` is a command that becomes the process which it is given, such as one that enters a namespace first.
    `options_told`: options that its errors name, and what they are called by whoever had it started.
    """

    name: str
    arguments: list[str]
    ready_file: Path
    log_file: Path
    environment: dict[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    options_told: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _pipe_write_fd: int | None = None
    _log_start: int = 0
    _not_started: str = ""

    @property
    def pid(self) -> int:
        """Of the running process. Raises ProcessFailed when there is none."""
        if self._process is None:
            raise ProcessFailed(f"{self.name} is not running.")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended (a frozen process is running)."""
        return self._process is not None and self._process.poll() is None

    @property
    def return_code(self) -> int | None:
        """Of the last run, None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Starts it in a process group of its own: a Ctrl-C in the terminal reaches only us.

        Not in a session: a frozen one, which cannot see that we are gone, is then thawed by the kernel, with a SIGHUP
        before (POSIX on orphaned process groups). Raises ProcessFailed.
        """
        if self.is_running:
            raise ProcessFailed(f"{self.name} is already running.")
        self.wait_gone(0)  # frees what its last run left
        try:
            self._launch()
        except OSError as error:
            self._process, self._not_started = None, reason_of(error, self.log_file.parent)
            raise ProcessFailed(f"{self.name} {self.how_it_ended()}") from error

        self._not_started = ""

    def _launch(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        read_fd, write_fd = os.pipe()
        try:
            with self.log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self.within, sys.executable, "-m", "kvferry.drills.child", str(read_fd), *self.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(read_fd,),
                    process_group=0,
                    env=_inherited() | self.environment,
                )
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        self._pipe_write_fd = write_fd

    def wait_ready(self, timeout_s: float = READY_S) -> dict[str, Any]:
        """What it wrote to its ready file. Raises ProcessFailed with the sentence it ended with."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.ready_file.exists():
                ready: dict[str, Any] = json.loads(self.ready_file.read_text())
                return ready
            if not self.is_running:
                raise self._did_not_start()
            time.sleep(POLL_S)
        raise ProcessFailed(f"{self.name} was not ready after {timeout_s:.0f} s (log: {self.log_file}).")

    @property
    def is_ready(self) -> bool:
        """Whether this run serves."""
        return self.is_running and self.ready_file.exists()

    def how_it_ended(self) -> str:
        """ "was killed by SIGKILL", or how it ended by itself and the error it named, if any."""
        code = self.return_code
        if code is None:
            return f"could not be started ({self._not_started})" if self._not_started else "has not ended"
        if code < 0:
            return f"was killed by {_name_of(-code)}"
        how = "ended by itself" if code == 0 else f"ended by itself with exit code {code}"
        why = self._why()
        return f"{how} ({why.rstrip('.')})" if why else how

    def last_words(self) -> str:
        """Why this run failed as far as is known, else its last line, else how it ended."""
        return self._why() or (self._lines() or [f"it {self.how_it_ended()} and said nothing"])[-1].strip()

    def _why(self) -> str:
        """The last error that it named, and the full disk that may have kept it from naming one; "" for neither."""
        errors = [line.removeprefix("error: ").strip() for line in self._lines() if line.startswith("error: ")]
        said = self._in_our_words(errors[-1]) if errors else ""
        full = why_full(self.log_file.parent) if self.return_code else None
        if full is None:
            return said
        return f"{said.rstrip('.')}; {full}" if said else full

    def _in_our_words(self, sentence: str) -> str:
        for named, told in self.options_told.items():
            sentence = re.sub(rf"{named}\b(?!-)", told, sentence)
        return sentence

    def _lines(self) -> list[str]:
        """What this run logged, if that can be read; the end of it, should it be very long."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - LOG_BYTES_MAX))
                return [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return []

    def _did_not_start(self) -> ProcessFailed:
        error = ProcessFailed(f"{self.name} did not start: {self.last_words()} (log: {self.log_file})")
        error.exit_code = max(1, self.return_code or 1)  # as the command itself would have ended
        return error

    def send(self, number: signal.Signals) -> None:
        """To this process only; nothing to one that has ended, as it may at any moment."""
        if self._process is not None:
            self._process.send_signal(number)

    def signal(self, number: signal.Signals) -> None:
        """The same. Raises ProcessFailed when it does not run."""
        if not self.is_running:
            raise ProcessFailed(f"{self.name} is not running, it cannot get {number.name}.")
        self.send(number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait_gone(KILL_S)

    def ask_to_stop(self) -> None:
        """SIGTERM (a frozen process is thawed first); no error when it has ended already."""
        if self.is_running:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether it ended in time; forgets it then."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._pipe_write_fd is not None:
            os.close(self._pipe_write_fd)
            self._pipe_write_fd = None
        return True

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """SIGTERM, then SIGKILL when it takes longer than `timeout_s`; True when it went by itself."""
        self.ask_to_stop()
        return self.end_within(timeout_s)

    def end_within(self, timeout_s: float) -> bool:
        """As `stop`, for what has been asked already: a second SIGTERM means that nothing is to be saved."""
        if self.wait_gone(timeout_s):
            return True
        self.send(signal.SIGKILL)
        self.wait_gone(KILL_S)
        return False


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
