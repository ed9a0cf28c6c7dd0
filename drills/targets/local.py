"""Processes of this machine, no privileges: a coordinator and nodes on the loopback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvferry.drills.cluster import Place
from kvferry.drills.process import ManagedProcess
from kvferry.drills.scenarios import COORDINATOR, Disturbance, Scenario
from kvferry.drills.targets import fuse
from kvferry.drills.targets.processes import ProcessTarget
from kvferry.drills.targets.proxy import Relay, Upstream

SLOW_BYTES_PER_S: Final = 4000.0
SLOW_DELAY_S: Final = 0.1

_ON_CABLES: Final = frozenset({Disturbance.CUT, Disturbance.CUT_OUTGOING, Disturbance.SLOW_LINK, Disturbance.POWER_CUT})


class LocalTarget(ProcessTarget):
    """Cables are TCP relays, in this process, between each node and the rest."""

    kind = "local"
    _relay: Relay | None = None

    @property
    def ways(self) -> Mapping[Disturbance, str]:
        ways = dict(super().ways) | {
            Disturbance.FREEZE: "SIGSTOP to the process",
            Disturbance.CUT: "a TCP relay that passes nothing in either direction and closes nothing",
            Disturbance.CUT_OUTGOING: "a TCP relay that passes on nothing of what the node sends",
            Disturbance.SLOW_LINK: (
                f"a TCP relay: {SLOW_BYTES_PER_S / 1000:.0f} kB/s and {SLOW_DELAY_S * 1000:.0f} ms, in each direction"
            ),
            Disturbance.POWER_CUT: "a TCP relay that falls silent, then SIGKILL to the process",
        }
        if fuse.why_no_fuse() is None:
            ways[Disturbance.STORE_FULL] = "a FUSE folder that answers every write with ENOSPC"
        return ways

    def why_not(self, what: Disturbance) -> str:
        if what in {Disturbance.STORE_HUNG, Disturbance.STORE_FULL}:
            return fuse.why_no_fuse() or ""
        return "libfaketime is not installed"

    def stop(self) -> None:
        super().stop()
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _places(self, scenario: Scenario) -> Mapping[str, Place]:
        if not scenario.disturbances & _ON_CABLES:
            return {}
        relay = self._relay = Relay()
        places = {}
        for name in self._names:
            to_coordinator = relay.listen(name, self._serving(COORDINATOR), part_dials=True)
            to_node = relay.listen(name, self._serving(name), part_dials=False)
            places[name] = Place(coordinator=f"127.0.0.1:{to_coordinator}", advertise=f"127.0.0.1:{to_node}")
        return places

    def _acts(self) -> dict[Disturbance, tuple[Callable[[str], None], Callable[[str], None]]]:
        def power_off(part: str) -> None:
            self._cables.set(part, into=False, out=False)
            self._kill(part)

        def power_on(part: str) -> None:
            mend(part)
            self._begin(part)

        def mend(part: str) -> None:
            self._cables.set(part)

        return super()._acts() | {
            Disturbance.CUT: (lambda part: self._cables.set(part, into=False, out=False), mend),
            Disturbance.CUT_OUTGOING: (lambda part: self._cables.set(part, out=False), mend),
            Disturbance.SLOW_LINK: (
                lambda part: self._cables.set(part, delay_s=SLOW_DELAY_S, bytes_per_s=SLOW_BYTES_PER_S),
                mend,
            ),
            Disturbance.POWER_CUT: (power_off, power_on),
        }

    @property
    def _cables(self) -> Relay:
        assert self._relay is not None  # noqa: S101 - made in _places for every scenario that needs one
        return self._relay

    def _serving(self, name: str) -> Upstream:
        """Where that process serves, by its ready file; asked at each connection."""

        def place() -> tuple[str, int] | None:
            process: ManagedProcess = self._process(name)
            if not process.is_ready:
                return None
            host, _, port = str(process.wait_ready(1)["address"]).rpartition(":")
            return host, int(port)

        return place
