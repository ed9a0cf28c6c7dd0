"""What the coordinator tells a monitor: its fleet and its turns. Names are stable: docs/metrics.md lists them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvferry.coordinator.turn import Turn
from kvferry.proto.v1 import chat_pb2
from kvferry.telemetry.families import (
    PREFIX,
    counter,
    gauge,
    info,
    labelled,
    labelled_counter,
    of_message,
    of_messages,
    value,
)
from kvferry.telemetry.loop_lag import LoopLag

SCRAPE_SECONDS: Final = 5.0
"""A registry that hangs must not hang the monitor."""

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
ERRORS: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5)

OF_CLUSTER: Final = (
    gauge("uptime_seconds", "coordinator_uptime_seconds", "Since the process started."),
    gauge("generation", "coordinator_generation", "Raised by each start of a coordinator on its registry."),
    gauge("n_sessions", "sessions", "Conversations in the registry."),
    gauge("n_open_turns", "turns_open", "Turns that are not finished."),
    gauge("n_snapshots", "store_snapshots", "Snapshots that the coordinator knows of."),
    gauge("snapshot_bytes", "store_bytes", "Bytes of those snapshots."),
    counter("n_failovers", "failovers", "Placements lost by a node that had taken the turn."),
)  # fmt: skip

OF_NODE: Final = (
    gauge("n_running", "node_turns_running", "Turns in the batch."),
    gauge("n_queued", "node_turns_queued", "Turns that wait there."),
    gauge("n_resident_sessions", "node_resident_sessions", "Sessions with rows in its memory."),
    gauge("kv_bytes_used", "node_kv_cache_bytes_used", "K/V memory in use."),
    gauge("kv_bytes_budget", "node_kv_cache_bytes_budget", "K/V memory that it has."),
    gauge("seconds_since_heartbeat", "node_silence_seconds", "Since its last heartbeat."),
    gauge("prefill_tokens_per_second", "node_prefill_tokens_per_second", "Latest rate."),
    gauge("decode_tokens_per_second", "node_decode_tokens_per_second", "Latest rate."),
    gauge("store_ok", "node_store_up", "1 while it can use the snapshot store."),
    gauge("other_store", "node_other_store", "1 when it saves to another store than the coordinator looks at."),
)

NODE_LABELS: Final = {"node": "node_id"}

REASONS: Final = ("resident", "stored", "only_node", "soonest", "failover")
"""What spoke for a placement's node; docs/metrics.md says what each means."""


def reason_of(placement: chat_pb2.Placement, *, is_first: bool) -> str:
    """The first of REASONS that holds, from the last one on: whatever else spoke for it, a failover is one."""
    chosen = next((candidate for candidate in placement.candidates if candidate.chosen), None)
    if not is_first:
        return "failover"
    if chosen is not None and chosen.n_resident and not chosen.n_restored:
        return "resident"
    if chosen is not None and chosen.n_restored:
        return "stored"
    return "only_node" if placement.n_candidates == 1 else "soonest"


class CoordinatorMetrics(Collector):
    """Made in the event loop that runs `status` and `turn_finished`; `collect` is called by any other thread."""

    def __init__(
        self,
        status: Callable[[], Coroutine[None, None, chat_pb2.GetStatusResponse]],
        n_waiting: Callable[[], int],
        loop_lag: LoopLag,
        refusals: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        own = self._registry = CollectorRegistry()
        self._status = status
        self._n_waiting = n_waiting
        self._loop_lag = loop_lag
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._turns = Counter(f"{PREFIX}_turns", "Turns by how they ended.", ["reason"], registry=own)
        self._first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds", "From the turn's record to its first token.", buckets=SECONDS,
            registry=own,
        )  # fmt: skip
        self._per_token = Histogram(
            f"{PREFIX}_time_per_token_seconds", "After the first token, the mean of each answer.",
            buckets=TOKEN_SECONDS, registry=own,
        )  # fmt: skip
        self._pause = Histogram(
            f"{PREFIX}_failover_pause_seconds", "The longest wait for a token that a lost node caused, per moved turn.",
            buckets=SECONDS, registry=own,
        )  # fmt: skip
        self._error = Histogram(
            f"{PREFIX}_prediction_error_ratio", "|foreseen - actual| / actual time to first token of a placement.",
            buckets=ERRORS, registry=own,
        )  # fmt: skip
        self._prompt = Counter(
            f"{PREFIX}_prompt_tokens", "Tokens of placed prompts by where their rows came from.", ["source"],
            registry=own,
        )  # fmt: skip
        self._answer = Counter(f"{PREFIX}_answer_tokens", "Tokens of answers.", registry=own)
        self._dropped = Counter(
            f"{PREFIX}_tokens_dropped", "Tokens a node sent that a client has or that came too late.", registry=own
        )
        self._missing = Counter(f"{PREFIX}_tokens_lost", "Tokens of answers that no event brought.", registry=own)
        self._doubled = Counter(
            f"{PREFIX}_tokens_duplicated", "Tokens of answers that several events brought.", registry=own
        )
        self._reasons = Counter(
            f"{PREFIX}_placement_reasons", "Placements by what spoke for the node.", ["reason"], registry=own
        )
        for reason in REASONS:
            self._reasons.labels(reason)
        self._placed = Counter(f"{PREFIX}_placements", "Placements by node.", ["node"], registry=own)
        self._lost = Counter(
            f"{PREFIX}_placements_lost", "Placements that ended before their answer, by cause.", ["cause"], registry=own
        )

    def turn_finished(self, turn: Turn) -> None:
        """Count a turn that ended."""
        outcome = turn.outcome
        if outcome is None:
            return
        self._turns.labels(outcome.reason.name.lower()).inc()
        self._answer.inc(len(outcome.answer_ids))
        self._dropped.inc(turn.n_dropped)
        if outcome.first_token_seconds:
            self._first_token.observe(outcome.first_token_seconds)
        if len(outcome.answer_ids) > 1:
            self._per_token.observe(turn.decode_seconds / (len(outcome.answer_ids) - 1))
        if outcome.longest_pause_seconds:
            self._pause.observe(outcome.longest_pause_seconds)
        self._audit(turn)
        self._count_placements(turn.placements)
        for event in turn.events:
            if event.HasField("node_lost"):
                self._lost.labels(event.node_lost.cause).inc()

    def _audit(self, turn: Turn) -> None:
        """What subscribers were shown, counted anew: the promise that it is each token once is kept elsewhere."""
        shown = [event.sequence for event in turn.events if event.HasField("token")]
        n_different = len(set(shown))
        self._doubled.inc(len(shown) - n_different)
        self._missing.inc(max(len(turn.answer_ids) - n_different, 0))

    def _count_placements(self, placements: Iterable[chat_pb2.Placement]) -> None:
        for number, placement in enumerate(placements):
            self._placed.labels(placement.node_id).inc()
            self._reasons.labels(reason_of(placement, is_first=number == 0)).inc()
            self._prompt.labels("resident").inc(placement.prefix.n_resident)
            self._prompt.labels("restored").inc(placement.prefix.n_restored)
            self._prompt.labels("computed").inc(placement.prefix.n_computed)
            actual = placement.first_token_seconds
            if actual and placement.predicted_seconds:
                self._error.observe(abs(placement.predicted_seconds - actual) / actual)

    def collect(self) -> Iterator[Metric]:
        """Of the turns since the start, and of the cluster at this moment."""
        yield from self._registry.collect()
        yield self._loop_lag.metric()
        yield labelled_counter("calls_refused", "Calls refused because of who asked.", "code", self._refusals())
        status = asyncio.run_coroutine_threadsafe(self._status(), self._loop).result(SCRAPE_SECONDS)
        yield info(
            "coordinator",
            "Who this is.",
            {"id": status.coordinator_id, "version": status.version, "model": status.model},
        )
        yield from of_message(status, OF_CLUSTER)
        yield value("turns_waiting", "Turns of this coordinator that no node has at the moment.", self._n_waiting())
        yield from of_messages(status.nodes, OF_NODE, NODE_LABELS)
        n_of_state = {}
        for number, name in chat_pb2.NodeState.items():
            count = sum(node.state == name for node in status.nodes)
            n_of_state[number.removeprefix("NODE_STATE_").lower()] = count
        yield labelled("nodes", "Nodes by state.", "state", n_of_state)
