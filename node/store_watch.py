"""How long reading and writing rows takes: for a monitor, and as spans. The I/O threads tell when they are done."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric

from kvferry.node.messages import PublishDone, RestoreDone, StoreDone
from kvferry.telemetry import gen_ai, tracing
from kvferry.telemetry.families import PREFIX

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
"""From a few blocks on a local disk to 8K tokens of a 2B model over 1 GbE."""

MAX_FOLLOWED: Final = 1024
"""Sessions whose latest run's span is remembered: a session is saved after its turn."""


class StoreWatch:
    """Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, object] = OrderedDict()  # by session
        self._registry = CollectorRegistry()
        self._restore = Histogram(
            f"{PREFIX}_restore_seconds", "Reading the rows of one prefix.", buckets=SECONDS, registry=self._registry
        )
        self._save = Histogram(
            f"{PREFIX}_save_seconds", "Writing one snapshot.", buckets=SECONDS, registry=self._registry
        )

    def follow(self, session_id: str, run: tracing.Span) -> None:
        """What is read and written for this session from now on belongs to this run."""
        if not tracing.is_on():
            return
        with self._lock:
            self._runs.pop(session_id, None)
            self._runs[session_id] = run.as_parent
            if len(self._runs) > MAX_FOLLOWED:
                self._runs.popitem(last=False)

    def note(self, done: StoreDone) -> None:
        """What was read or written; what came to nothing has no time."""
        if isinstance(done, RestoreDone):
            if done.sequence is not None:
                self._restore.observe(done.seconds)
        elif done.published is not None and not done.already_there:
            self._save.observe(done.published.seconds)
        if tracing.is_on():
            self._trace(done)

    def collect(self) -> Iterable[Metric]:
        """As a scrape has it."""
        return self._registry.collect()

    def _trace(self, done: StoreDone) -> None:
        session_id = done.request.session_id
        with self._lock:
            parent = self._runs.get(session_id)
        name, seconds = "restore", 0.0
        found: dict[str, str | int] = {gen_ai.CONVERSATION: session_id}
        if isinstance(done, RestoreDone):
            seconds = done.seconds
            n_rows = 0 if done.sequence is None else done.sequence.n_rows
            found |= {"kvferry.snapshot": done.snapshot, "kvferry.rows": n_rows, "kvferry.bytes": done.n_bytes,
                      "kvferry.snapshots.refused": len(done.refused)}  # fmt: skip
        else:
            name = "save"
            if (published := done.published) is not None:
                seconds = published.seconds
                found |= {"kvferry.snapshot": published.name, "kvferry.rows": published.n_tokens,
                          "kvferry.bytes": published.n_bytes}  # fmt: skip
        span = tracing.begin(name, attributes=found, parent=parent, seconds_ago=seconds)
        if isinstance(done, PublishDone) and done.error is not None:
            span.fail(str(getattr(done.error, "code", "internal")))
        span.end()
