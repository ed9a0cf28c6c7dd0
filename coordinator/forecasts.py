"""What the router knows of each node besides membership: its speed, its work, what lies in its memory. Pure.

Everything here only makes predictions better or worse. A fresh coordinator knows none of it and routes all the same.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from kvferry.coordinator.backlog import Awaited, Backlog
from kvferry.coordinator.membership import Node
from kvferry.coordinator.prediction import GUESSED_TURN_SECONDS, Coming, Forecast, Prediction
from kvferry.coordinator.rates import Foreseen, NodeRates, Rates, Report, Told, typical
from kvferry.coordinator.registry import TokenArray
from kvferry.proto.v1 import common_pb2
from kvferry.store.lcp_index import LcpIndex

MAX_SCORED: Final = 256
"""Latest predictions that the median error is taken over."""

TURN_SECONDS_WEIGHT: Final = 0.1

MIN_AWAITED_TOKENS: Final = 32
"""Fewer tokens in common, some blocks of a node's cache, are computed twice rather than waited for."""

ORDINARY_SHARE: Final = 2
"""What is usual in the fleet is worked out anew after every half of its nodes' number of reports: it changes slowly."""


@dataclasses.dataclass(slots=True)
class Awaiting:
    """A placement, from its beginning to its end. Made by ``Forecasts.placed``."""

    node: Node
    predicted_s: float
    placed_s: float
    beside_decodes: bool
    work: Awaited
    foreseen: Foreseen
    # What the node spent on this turn alone; 0 until it has reported.
    spent_s: float = 0.0
    has_token: bool = False
    is_over: bool = False


@dataclasses.dataclass(slots=True)
class _NodeKnowledge:
    boot_id: str
    rates: NodeRates
    backlog: Backlog = dataclasses.field(default_factory=Backlog)
    # Tokens of the sessions in its memory, as far as this coordinator saw them.
    memory: LcpIndex = dataclasses.field(default_factory=LcpIndex)
    # The same of the turns that wait for their first token, by a name for each.
    coming: LcpIndex = dataclasses.field(default_factory=LcpIndex)
    awaiting: dict[str, Awaiting] = dataclasses.field(default_factory=dict)

    def no_longer_awaits(self, awaiting: Awaiting) -> None:
        """Its rows are in memory, or will not be."""
        name = str(id(awaiting))
        if self.awaiting.pop(name, None) is not None:
            self.coming.remove(name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Of the latest placements that brought a token; medians, 0 while there is none."""

    n: int
    error: float
    predicted_seconds: float
    actual_seconds: float


class Forecasts:
    """One per coordinator. Times are those of one clock that does not jump."""

    def __init__(self) -> None:
        self._nodes: dict[str, _NodeKnowledge] = {}
        self._scores: deque[tuple[float, float]] = deque(maxlen=MAX_SCORED)
        self._turn_s = GUESSED_TURN_SECONDS
        self._ordinary = Rates()
        self._n_unlearned = 0

    # What happens.

    def placed(
        self, node: Node, prediction: Prediction, n_others: int, now_s: float, token_ids: TokenArray | None = None
    ) -> Awaiting:
        """The node has a turn with these tokens, int32 [n]; it has ``n_others`` besides."""
        known = self._known(node)
        backlog = known.backlog
        beside_decodes = n_others > len(backlog)
        work = backlog.add(prediction.restore_seconds, prediction.look_seconds, prediction.work_seconds, now_s)
        # What waits for another turn's rows tells nothing of how fast its own are computed.
        spent_s = 0.0 if prediction.awaits_rows else prediction.shared_seconds + prediction.prefill_seconds
        awaiting = Awaiting(node, prediction.seconds, now_s, beside_decodes, work, Foreseen(spent_s, backlog.drag))
        if token_ids is not None:
            name = str(id(awaiting))
            known.awaiting[name] = awaiting
            known.coming.add(name, token_ids)
        return awaiting

    def reported(self, awaiting: Awaiting, prefix: common_pb2.PrefixReport, now_s: float) -> None:
        """The node says what it did for the turn, as it shows its first token."""
        known = self._known(awaiting.node)
        report = Report(
            n_tokens=prefix.n_tokens, n_restored=prefix.n_restored, n_computed=prefix.n_computed,
            restore_seconds=prefix.restore_seconds, prefill_seconds=prefix.prefill_seconds,
            bytes_per_row=awaiting.node.bytes_per_row, n_looked=prefix.n_looked, look_seconds=prefix.look_seconds,
            prefilled_alone=awaiting.work.prefilled_alone,
            restored_alone=awaiting.work.restored_alone, beside_decodes=awaiting.beside_decodes,
            foreseen=awaiting.foreseen,
        )  # fmt: skip
        awaiting.spent_s = prefix.restore_seconds + prefix.look_seconds + prefix.prefill_seconds
        told = told_by(awaiting.node)
        known.rates.learn(report, told, self._ordinary, now_s)
        known.backlog.drag = known.rates.now(told, self._ordinary).decode_drag
        self._n_unlearned += 1
        if self._n_unlearned * ORDINARY_SHARE >= len(self._nodes):
            self._n_unlearned = 0
            self._ordinary = typical(k.rates.now(Told(), Rates()) for k in self._nodes.values() if k.rates.has_learned)

    def first_token(self, awaiting: Awaiting, now_s: float) -> None:
        """Its first token is there: it decodes now."""
        if awaiting.is_over or awaiting.has_token:
            return
        awaiting.has_token = True
        actual_s = now_s - awaiting.placed_s
        self._scores.append((awaiting.predicted_s, actual_s))
        known = self._known(awaiting.node)
        known.no_longer_awaits(awaiting)
        known.backlog.begins_to_decode(awaiting.work, now_s)
        if awaiting.spent_s and awaiting.work.prefilled_alone:
            known.rates.learn_start(actual_s - awaiting.spent_s, self._ordinary, beside_decodes=awaiting.beside_decodes)

    def over(self, awaiting: Awaiting, now_s: float) -> None:
        """The node has it no longer. No effect the second time."""
        if not awaiting.is_over:
            awaiting.is_over = True
            known = self._known(awaiting.node)
            known.no_longer_awaits(awaiting)
            known.backlog.remove(awaiting.work, now_s)

    def turn_ended(self, decode_s: float) -> None:
        """A turn held its slot for this long after its first token."""
        self._turn_s += TURN_SECONDS_WEIGHT * (decode_s - self._turn_s)

    def remembers(self, node: Node, session_id: str, token_ids: TokenArray) -> None:
        """The node has these tokens' rows, int32 [n], in its memory."""
        self._known(node).memory.add(session_id, token_ids)

    def heard(self, node: Node, resident: Mapping[str, int]) -> None:
        """All that is in the node's memory now."""
        memory = self._known(node).memory
        for session_id in [s for s in memory if s not in resident]:
            memory.remove(session_id)

    # What is asked.

    def of(self, nodes: Mapping[str, Node], now_s: float) -> ForecastsNow:
        """By node id, each worked out when it is asked for. ``nodes``: by id."""
        return ForecastsNow(nodes, lambda node: self._forecast(node, now_s))

    def shared(self, nodes: Iterable[Node], token_ids: TokenArray) -> dict[str, int]:
        """node_id → leading tokens of these, int32 [n], whose rows its memory has for any session."""
        found: dict[str, int] = {}
        for node in nodes:
            known = self._nodes.get(node.node_id)
            match = known.memory.find(token_ids) if known and known.boot_id == node.boot_id else None
            if match is not None:
                found[node.node_id] = min(match.n_common, node.resident.get(match.key, match.n_common))
        return found

    def coming(self, nodes: Iterable[Node], token_ids: TokenArray, now_s: float) -> dict[str, Coming]:
        """node_id → leading tokens of these, int32 [n], whose rows a turn there is computing."""
        found: dict[str, Coming] = {}
        for node in nodes:
            known = self._nodes.get(node.node_id)
            match = known.coming.find(token_ids) if known and known.awaiting and known.boot_id == node.boot_id else None
            if known is not None and match is not None and match.n_common >= MIN_AWAITED_TOKENS:
                found[node.node_id] = Coming(match.n_common, self.seconds_left(known.awaiting[match.key], now_s))
        return found

    def seconds_left(self, awaiting: Awaiting, now_s: float) -> float:
        """Until it has its first token, as far as one knows now."""
        return self._known(awaiting.node).backlog.seconds_left(awaiting.work, now_s)

    def accuracy(self) -> Accuracy:
        if not self._scores:
            return Accuracy(n=0, error=0.0, predicted_seconds=0.0, actual_seconds=0.0)
        return Accuracy(
            n=len(self._scores),
            error=statistics.median(abs(p - a) / max(a, 1e-6) for p, a in self._scores),
            predicted_seconds=statistics.median(p for p, _ in self._scores),
            actual_seconds=statistics.median(a for _, a in self._scores),
        )

    # How it does it.

    def _known(self, node: Node) -> _NodeKnowledge:
        """A new boot begins with an empty memory and no work; the board's speed stays what it was."""
        known = self._nodes.get(node.node_id)
        if known is None or known.boot_id != node.boot_id:
            rates = known.rates if known else NodeRates()
            known = _NodeKnowledge(node.boot_id, rates)
            known.backlog.drag = rates.now(told_by(node), self._ordinary).decode_drag
            self._nodes[node.node_id] = known
        return known

    def _forecast(self, node: Node, now_s: float) -> Forecast:
        known = self._nodes.get(node.node_id)
        rates = (known.rates if known else NodeRates()).now(told_by(node), self._ordinary)
        if known is None or known.boot_id != node.boot_id:
            return Forecast(rates=rates, turn_s=self._turn_s)
        return Forecast(rates=rates, ahead=known.backlog.ahead(now_s), turn_s=self._turn_s)


class ForecastsNow(Mapping[str, Forecast]):
    """A route looks at a few dozen nodes of thousands; the others' forecasts are not worth making."""

    def __init__(self, nodes: Mapping[str, Node], make: Callable[[Node], Forecast]) -> None:
        self._nodes, self._make = nodes, make

    def __getitem__(self, node_id: str) -> Forecast:
        return self._make(self._nodes[node_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def told_by(node: Node) -> Told:
    return Told(prefill_tokens=node.load.prefill_tokens_per_second, restore_bytes=node.load.restore_bytes_per_second)
