"""The one interface through which a scenario strikes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from kvferry.client.sdk import Client
from kvferry.drills.journal import Journal
from kvferry.drills.scenarios import Disturbance, Scenario


class Target(ABC):
    """A cluster that can be struck. Made, used and ended by one thread.

    Whatever a target does to the world is in its journal first, so that it is undone even if nobody is left to call
    `heal` or `stop`.
    """

    kind: str
    answer_tokens: int = 64
    """Long enough that a strike finds the answer unfinished."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    @property
    @abstractmethod
    def ways(self) -> Mapping[Disturbance, str]:
        """What it can do here and now, and the means by which: a sentence for the report."""

    @abstractmethod
    def why_not(self, what: Disturbance) -> str:
        """The reason why a disturbance is not among its ways."""

    @property
    @abstractmethod
    def address(self) -> str:
        """host:port of the coordinator, for this process."""

    def connect(self, patience_s: float) -> Client:
        """A client of its coordinator."""
        return Client(self.address, patience_s=patience_s)

    @property
    @abstractmethod
    def node_ids(self) -> frozenset[str]:
        """The nodes that belong to it."""

    @abstractmethod
    def start(self, scenario: Scenario) -> None:
        """Makes the cluster, ready for this scenario. Raises DrillError."""

    @abstractmethod
    def inject(self, number: int, what: Disturbance, parts: tuple[str, ...]) -> float:
        """Strikes these parts (node ids, COORDINATOR, STORE) for the scenario's injection `number`, counted from 0.

        Returns when the first of them was struck, by time.monotonic.
        """

    @abstractmethod
    def heal(self, what: Disturbance, parts: tuple[str, ...]) -> None:
        """Undoes that; what was killed is started again, and not waited for."""

    @abstractmethod
    def stop(self) -> None:
        """Ends what it started."""

    def left_behind(self) -> list[str]:
        """After the journal's end: what is still there and should not be."""
        if not self.journal.folder.exists():
            return []
        return [f"folder {self.journal.folder}", *self.journal.failures]

    @abstractmethod
    def keep_logs(self, folder: Path) -> None:
        """Copies what its processes wrote into this folder, before it goes."""
