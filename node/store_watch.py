"""How long reading and writing rows takes. The I/O threads tell, a monitor asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric

from kvferry.node.messages import RestoreDone, StoreDone
from kvferry.telemetry.families import PREFIX

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
"""From a few blocks on a local disk to 8K tokens of a 2B model over 1 GbE."""


class StoreWatch:
    """Any thread may call any method."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._restore = Histogram(
            f"{PREFIX}_restore_seconds", "Reading the rows of one prefix.", buckets=SECONDS, registry=self._registry
        )
        self._save = Histogram(
            f"{PREFIX}_save_seconds", "Writing one snapshot.", buckets=SECONDS, registry=self._registry
        )

    def note(self, done: StoreDone) -> None:
        """What was read or written; what came to nothing has no time."""
        if isinstance(done, RestoreDone):
            if done.sequence is not None:
                self._restore.observe(done.seconds)
        elif done.published is not None and not done.already_there:
            self._save.observe(done.published.seconds)

    def collect(self) -> Iterable[Metric]:
        """As a scrape has it."""
        return self._registry.collect()
