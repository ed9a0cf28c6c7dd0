"""The one interface through which a scenario strikes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from kvferry.drills.journal import Entry, Journal
from kvferry.drills.scenarios import Disturbance, Scenario


class Target(ABC):
    """A cluster that can be struck. Made, used and ended by one thread.

    Whatever a target does to the world is in its journal first, so that it is undone even if nobody is left to call
    `heal` or `stop`.
    """

    kind: str

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._open: dict[tuple[Disturbance, str], list[Entry]] = {}

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

    @property
    @abstractmethod
    def node_ids(self) -> frozenset[str]:
        """The nodes that belong to it."""

    @abstractmethod
    def start(self, scenario: Scenario) -> None:
        """Makes the cluster, ready for this scenario. Raises DrillError."""

    @abstractmethod
    def inject(self, what: Disturbance, part: str) -> None:
        """Strikes one part: a node id, COORDINATOR or STORE."""

    @abstractmethod
    def heal(self, what: Disturbance, part: str) -> None:
        """Undoes that; what was killed is started again, and not waited for."""

    @abstractmethod
    def stop(self) -> None:
        """Ends what it started."""

    def left_behind(self) -> list[str]:
        """After the journal's end: what is still there and should not be."""
        return [f"folder {self.journal.folder}"] if self.journal.folder.exists() else []

    @abstractmethod
    def keep_logs(self, folder: Path) -> None:
        """Copies what its processes wrote into this folder, before it goes."""

    def _strike_out(self, what: Disturbance, part: str) -> None:
        for entry in self._open.pop((what, part), []):
            self.journal.undo(entry)
