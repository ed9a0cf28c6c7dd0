"""Watches a cluster while it is disturbed: what the coordinator says of its nodes, and when that changed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from kvferry.client.errors import ClientError
from kvferry.client.sdk import Client, NodeInfo, NodeState, StoreFigures

POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Sight:
    """A node's state changed, or its store's: at this time, seen from outside."""

    at: float
    node_id: str
    state: NodeState
    store_ok: bool

    @property
    def is_well(self) -> bool:
        """It serves, and its store does as well."""
        return self.state is NodeState.LIVE and self.store_ok


@dataclass
class Watch:
    """As a context manager it polls in a thread of its own. `client` has no patience, and is not closed."""

    client: Client
    sights: list[Sight] = field(default_factory=list)
    bytes_restored: int = 0
    files_refused: int = 0
    saves_without_room: int = 0
    _last: dict[str, NodeInfo] = field(default_factory=dict)
    _counted: dict[str, tuple[int, StoreFigures]] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(10)

    def is_whole(self, node_ids: frozenset[str]) -> bool:
        """Whether all of these serve, by the latest look."""
        last = dict(self._last)
        return all(node_id in last and is_well(last[node_id]) for node_id in node_ids)

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            try:
                nodes = self.client.nodes()
            except ClientError:  # the coordinator itself is gone
                self._last = {}
                continue
            for node in nodes:
                self._look(node)

    def _look(self, node: NodeInfo) -> None:
        before = self._last.get(node.node_id)
        if before is None or (before.state, before.store_ok) != (node.state, node.store_ok):
            self.sights.append(Sight(time.monotonic(), node.node_id, node.state, node.store_ok))
        self._last = {**self._last, node.node_id: node}
        if node.store is not None:
            self._count(node.node_id, node.pid, node.store)

    def _count(self, node_id: str, pid: int, now: StoreFigures) -> None:
        """A process that is there when we come has done things before; one that starts later begins at zero."""
        seen_pid, before = self._counted.get(node_id, (pid, now))

        def more(name: str) -> int:
            return max(0, int(getattr(now, name)) - (int(getattr(before, name)) if seen_pid == pid else 0))

        self.bytes_restored += more("bytes_restored")
        self.files_refused += more("files_refused")
        self.saves_without_room += more("saves_without_room")
        self._counted[node_id] = pid, now


def is_well(node: NodeInfo) -> bool:
    """It serves, and can read its store."""
    return node.state is NodeState.LIVE and (node.store_ok or node.store is None)
