"""What the nodes did in the last minutes, for pictures; kept while somebody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvferry.client import NodeInfo

N_SAMPLES: Final = 300
"""Five minutes of one a second."""

STEP_MS: Final = 900

Sample = tuple[int, float, float, float | None]
"""When (ms since 1970), tokens drawn per second since the sample before, part of the K/V memory in use, Celsius."""


@dataclass(slots=True)
class _Kept:
    at_ms: float
    tokens_generated: int
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=N_SAMPLES))


class History:
    """Fed by whoever asks for the nodes, however many do. `now_ms`: since 1970."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._kept: dict[str, _Kept] = {}

    def add(self, nodes: Iterable[NodeInfo]) -> None:
        """The nodes as they are now; a node that is gone is forgotten."""
        now_ms = self._now_ms()
        before, self._kept = self._kept, {}
        for node in nodes:
            kept = self._kept[node.node_id] = before.get(node.node_id) or _Kept(now_ms, node.tokens_generated)
            if kept.samples and now_ms - kept.at_ms < STEP_MS:
                continue
            n_drawn = max(node.tokens_generated - kept.tokens_generated, 0)  # it counts from 0 after a new start
            rate = n_drawn / (now_ms - kept.at_ms) * 1000 if now_ms > kept.at_ms else 0.0
            used = node.kv_bytes_used / node.kv_bytes_budget if node.kv_bytes_budget else 0.0
            kept.samples.append((int(now_ms), round(rate, 1), round(used, 4), node.temperature_celsius))
            kept.at_ms, kept.tokens_generated = now_ms, node.tokens_generated

    def all(self) -> dict[str, list[Sample]]:
        """By node, the oldest first."""
        return {node_id: list(kept.samples) for node_id, kept in self._kept.items()}

    def latest(self) -> dict[str, list[Sample]]:
        """The last one of each."""
        return {node_id: list(kept.samples)[-1:] for node_id, kept in self._kept.items()}
