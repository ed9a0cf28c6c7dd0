"""What the two targets that make their own cluster share: processes that are killed, frozen and started again."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.drills.cluster import ClusterOptions, LocalCluster, Place
from kvferry.drills.errors import DrillImpossible
from kvferry.drills.journal import Entry, Journal
from kvferry.drills.process import KILL_S, ManagedProcess
from kvferry.drills.rot import rot_all
from kvferry.drills.scenarios import COORDINATOR, Disturbance, Scenario
from kvferry.drills.targets import clock, fuse
from kvferry.drills.targets.base import Target
from kvferry.drills.targets.clock import HOUR_S, ShiftedClock
from kvferry.drills.targets.fuse import FuseFolder
from kvferry.drills.undo import SignalProcess

DIES_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class OwnClusterOptions:
    """Of a cluster that is made for the drill and goes with it."""

    model: str
    n_nodes: int = 3
    threads_per_node: int = 1
    node_arguments: tuple[str, ...] = ()
    kv_memory: str = "256MiB"
    context: int | None = None


class ProcessTarget(Target):
    """A `LocalCluster` below the run's folder, started by `start`; subclasses say where its processes run."""

    def __init__(self, journal: Journal, options: OwnClusterOptions) -> None:
        super().__init__(journal)
        self._options = options
        self._cluster: LocalCluster | None = None
        self._store: FuseFolder | None = None
        self._clocks: dict[str, ShiftedClock] = {}
        self._processes: dict[str, Entry] = {}
        self._names = tuple(f"node-{number + 1}" for number in range(options.n_nodes))

    @property
    def ways(self) -> Mapping[Disturbance, str]:
        """Those that are the same wherever the processes run."""
        ways = {
            Disturbance.KILL: "SIGKILL to the process",
            Disturbance.STORE_ROTTEN: "a bit of each snapshot file is flipped",
        }
        if clock.library() is not None:
            ways[Disturbance.CLOCK_FORWARD] = "libfaketime: the process's clock is an hour fast"
            ways[Disturbance.CLOCK_BACK] = "libfaketime: the process's clock is an hour slow"
        if fuse.why_no_fuse() is None:
            ways[Disturbance.STORE_HUNG] = "a FUSE folder whose server is stopped by SIGSTOP"
        return ways

    @property
    def address(self) -> str:
        return self.cluster.address

    @property
    def node_ids(self) -> frozenset[str]:
        return frozenset(self._names)

    @property
    def cluster(self) -> LocalCluster:
        """Once it was started."""
        if self._cluster is None:
            raise DrillImpossible("The cluster was not started.")
        return self._cluster

    def start(self, scenario: Scenario) -> None:
        if Disturbance.CLOCK_FORWARD in scenario.disturbances or Disturbance.CLOCK_BACK in scenario.disturbances:
            self._clocks = {name: ShiftedClock(self.journal.work / f"clock-{name}") for name in self._all_names}
        self._prepare_store(scenario)
        places = self._places(scenario)
        options = ClusterOptions(
            model=self._options.model,
            directory=self.journal.work,
            n_nodes=self._options.n_nodes,
            threads_per_node=self._options.threads_per_node,
            kv_memory=self._options.kv_memory,
            context=self._options.context,
            node_arguments=self._options.node_arguments,
            places={name: self._with_clock(name, places.get(name, Place())) for name in self._all_names},
        )
        self._cluster = LocalCluster(options)
        self._cluster.start()
        for process in self._cluster.processes:
            self._note(process)

    def inject(self, number: int, what: Disturbance, parts: tuple[str, ...]) -> float:
        del number
        at = time.monotonic()
        for part in parts:
            self._acts()[what][0](part)
        return at

    def heal(self, what: Disturbance, parts: tuple[str, ...]) -> None:
        for part in parts:
            self._acts()[what][1](part)

    def stop(self) -> None:
        """Not in order: whoever ends a drill does not wait for a conversation to be saved."""
        if self._cluster is None:
            return
        if self._store is not None:
            self._store.answer()  # or nobody who waits for it could end
        self._cluster.kill_all()
        self._cluster.stop()
        for entry in self._processes.values():
            self.journal.undo(entry)
        self._processes = {}

    def keep_logs(self, folder: Path) -> None:
        logs = self.journal.work / "logs"
        if logs.is_dir():
            shutil.copytree(logs, folder, dirs_exist_ok=True)

    @property
    def _all_names(self) -> tuple[str, ...]:
        return (COORDINATOR, *self._names)

    def _places(self, scenario: Scenario) -> Mapping[str, Place]:
        """Where processes run; the loopback where nothing is said."""
        del scenario
        return {}

    def _prepare_store(self, scenario: Scenario) -> None:
        if scenario.disturbances & {Disturbance.STORE_HUNG, Disturbance.STORE_FULL}:
            self._store = FuseFolder(self.journal, self.journal.work / "store")

    def _acts(self) -> dict[Disturbance, tuple[Callable[[str], None], Callable[[str], None]]]:
        """How each disturbance is done, and undone."""
        return {
            Disturbance.KILL: (self._kill, self._begin),
            Disturbance.FREEZE: (self._freeze, self._thaw),
            Disturbance.STORE_HUNG: (lambda _part: self._fuse.hang(), lambda _part: self._fuse.answer()),
            Disturbance.STORE_FULL: (lambda _part: self._fuse.fill(), lambda _part: self._fuse.make_room()),
            Disturbance.STORE_ROTTEN: (lambda _part: self._rot(), lambda _part: None),
            Disturbance.CLOCK_FORWARD: (lambda part: self._clocks[part].shift(HOUR_S), self._set_clock_right),
            Disturbance.CLOCK_BACK: (lambda part: self._clocks[part].shift(-HOUR_S), self._set_clock_right),
        }

    @property
    def _fuse(self) -> FuseFolder:
        if self._store is None:
            raise DrillImpossible("The store was not made for this scenario.")
        return self._store

    def _process(self, part: str) -> ManagedProcess:
        return self.cluster.coordinator if part == COORDINATOR else self.cluster.nodes[part]

    def _kill(self, part: str) -> None:
        """One that waits for a store which hangs dies when that answers: it stays in the journal until it is begun."""
        process = self._process(part)
        process.signal(signal.SIGKILL)
        process.wait_gone(DIES_S)

    def _begin(self, part: str) -> None:
        if not self._process(part).wait_gone(KILL_S):
            raise DrillImpossible(f"{part} was killed and has not ended after {KILL_S:.0f} s.")
        self.journal.strike_out(self._processes.pop(part))
        self.cluster.begin(part)
        self._note(self._process(part))

    def _freeze(self, part: str) -> None:
        """In the journal it is a process to be killed already: without its drill a cluster is of no use."""
        self._process(part).signal(signal.SIGSTOP)

    def _thaw(self, part: str) -> None:
        self._process(part).signal(signal.SIGCONT)

    def _rot(self) -> None:
        if rot_all(self.journal.work / "store") == 0:
            raise DrillImpossible("There is no snapshot in the store whose bits could be flipped.")

    def _set_clock_right(self, part: str) -> None:
        self._clocks[part].shift(0)

    def _with_clock(self, name: str, place: Place) -> Place:
        clock = self._clocks.get(name)
        if clock is None:
            return place
        return Place(
            host=place.host,
            within=place.within,
            environment={**place.environment, **clock.environment},
            coordinator=place.coordinator,
            advertise=place.advertise,
        )

    def _note(self, process: ManagedProcess) -> None:
        """It ends by itself when the drill does, unless it is frozen, or busy saving; then it is killed."""
        undo = SignalProcess.to(process.pid, signal.SIGKILL)
        self._processes[process.name] = self.journal.write(f"{process.name} runs as process {process.pid}", undo)
