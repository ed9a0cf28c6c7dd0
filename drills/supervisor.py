"""Starts again what dies in a local cluster, so that a person can break anything in it and watch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry.drills.cluster import LocalCluster
from kvferry.drills.errors import ProcessFailed
from kvferry.drills.process import ManagedProcess

BACKOFF_S: Final = 1.0
"""Before the first restart: long enough that `kvferry nodes` shows the hole, short enough to wait for."""

BACKOFF_MAX_S: Final = 30.0

TRIES_MAX: Final = 5
"""Restarts in a row of a process that never lives for STEADY_S; then somebody must look at its log."""

STEADY_S: Final = 30.0
"""A process that served for so long has recovered: its next death is a new one."""


@dataclass
class _Watched:
    """`n_deaths` in a row; `restart_at` None: it runs, `ready_at` None: it does not serve yet."""

    process: ManagedProcess
    n_deaths: int = 0
    restart_at: float | None = None
    ready_at: float | None = None
    given_up: bool = False


class Supervisor:
    """Call `step` often, from the thread that uses the cluster. `say` gets one line for each thing that happens."""

    def __init__(
        self, cluster: LocalCluster, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._say = say
        self._now = now
        self._watched = [
            _Watched(process, ready_at=now() if process.is_ready else None) for process in cluster.processes
        ]

    def step(self) -> None:
        """Looks at every process once; never waits. Raises ProcessFailed when all of them were given up."""
        for watched in self._watched:
            if watched.given_up:
                continue
            if watched.restart_at is not None:
                self._restart_when_due(watched)
            elif not watched.process.is_running:
                self._died(watched, f"{watched.process.name} {watched.process.how_it_ended()}")
            else:
                self._look(watched)
        if all(watched.given_up for watched in self._watched):
            raise ProcessFailed("All processes of the cluster have ended and could not be started again.")

    def _died(self, watched: _Watched, how: str) -> None:
        """`how`: who, and what became of it."""
        process, now = watched.process, self._now()
        if watched.ready_at is not None and now - watched.ready_at >= STEADY_S:
            watched.n_deaths = 0
        watched.n_deaths += 1
        watched.ready_at = None
        process.wait_gone(0)
        if watched.n_deaths > TRIES_MAX:
            watched.given_up = True
            self._say(f"{how}; it was started {TRIES_MAX} times in vain and is left alone (log: {process.log_file})")
            return
        wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (watched.n_deaths - 1))
        watched.restart_at = now + wait_s
        self._say(f"{how}; starting it again in {wait_s:.0f} s")

    def _restart_when_due(self, watched: _Watched) -> None:
        assert watched.restart_at is not None  # noqa: S101 - for mypy; step() asked
        if self._now() >= watched.restart_at:
            watched.restart_at = None
            try:
                self._cluster.begin(watched.process.name)
            except ProcessFailed as error:  # as if it had died at once
                self._died(watched, str(error))

    def _look(self, watched: _Watched) -> None:
        if watched.ready_at is None and watched.process.is_ready:
            watched.ready_at = self._now()
            self._say(f"{watched.process.name} serves again, pid {watched.process.pid}")
