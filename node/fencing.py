"""Who may still ask this node for work: epochs per session, one coordinator generation, draining, the lease.

Leases give liveness, epochs give safety (reliability.md section 4): nothing here is correct only because a clock is
right. No clock, no I/O: time is an argument. Used by the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from kvferry.node.errors import Draining, LeaseLost, StaleCoordinator, StaleEpoch

MAX_EPOCHS: Final = 100_000
"""Sessions whose epoch is remembered, about 20 MB; a board serves some hundreds a day. The least recently seen go
first."""


@dataclass(slots=True)
class Fence:
    """The highest epoch seen per session, the highest coordinator generation, and until when each lease lasts.

    Epochs are compared within a generation. A higher one may know less, since its registry was lost or restored from a
    backup, and count a session's epochs anew; whatever a lower one still asks for is refused by its generation.

    Coordinators that share a registry have one generation and each a lease of its own: whoever does not hear this node
    any more gives its turns to another one, whatever the others hear. `coordinator` is an instance's id; for one that
    is not known, as for one that gave no id, a lease counts as lost when all are.
    """

    coordinator_generation: int = 0
    draining: bool = False
    _lease_ends: dict[str, float] = field(default_factory=dict)  # by coordinator; empty: never had one to lose
    # (generation, epoch) by session
    _epochs: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)

    def admit(self, session_id: str, epoch: int, generation: int, now: float, coordinator: str = "") -> None:
        """Let a turn in and remember its epoch; raises StaleCoordinator, StaleEpoch, Draining or LeaseLost."""
        self.see_generation(generation)
        seen = self._epochs.get(session_id, (0, 0))
        if (generation, epoch) < seen:
            raise StaleEpoch(f"session {session_id} is at epoch {seen[1]} here; a request of epoch {epoch} is too old")
        if self.draining:
            raise Draining("this node is being drained; send the turn to another one")
        if self.lease_lost(now, coordinator):
            raise LeaseLost("this node has not heard its coordinator for a whole lease; send the turn to another one")
        self._epochs[session_id] = (generation, epoch)
        self._epochs.move_to_end(session_id)
        if len(self._epochs) > MAX_EPOCHS:
            self._epochs.popitem(last=False)

    def see_generation(self, generation: int) -> None:
        """Remember a coordinator's generation; raises StaleCoordinator for one older than the newest seen."""
        if generation < self.coordinator_generation:
            raise StaleCoordinator(
                f"coordinator generation {generation} was replaced by {self.coordinator_generation}; "
                "stop the older coordinator, or, if the newer one is gone for good, start it with "
                f"--generation {self.coordinator_generation + 1}"
            )
        self.coordinator_generation = generation

    def renew_lease(self, asked_at: float, lease_seconds: float, coordinator: str = "") -> None:
        """The coordinator answered what was asked at `asked_at`. A lease counts from the asking, never from the
        answer."""
        self._lease_ends[coordinator] = asked_at + lease_seconds

    def forget_lease(self, coordinator: str) -> None:
        """Another instance of it has given a lease in its place."""
        self._lease_ends.pop(coordinator, None)

    def lease_lost(self, now: float, coordinator: str = "") -> bool:
        """Whether a lease was held and has ended."""
        ends_at = self._lease_ends.get(coordinator, self.lease_ends_at)
        return ends_at is not None and now >= ends_at

    @property
    def lease_ends_at(self) -> float | None:
        """When the last of all leases ends; None when there never was one."""
        return max(self._lease_ends.values(), default=None)

    def next_lease_end(self, now: float) -> float | None:
        """When the next lease ends that has not ended yet."""
        return min((ends_at for ends_at in self._lease_ends.values() if ends_at > now), default=None)
