"""What a node tells a monitor: its engine, its memory, its store. Names are stable: docs/metrics.md lists them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvferry.node.state import NodeState
from kvferry.proto.v1 import common_pb2
from kvferry.telemetry.families import counter, gauge, info, labelled_counter, of_message, value

OF_LOAD: Final = (
    gauge("n_running", "turns_running", "Turns in the batch."),
    gauge("n_queued", "turns_queued", "Turns that wait for a place in it, or for rows."),
    gauge("kv_bytes_used", "kv_cache_bytes_used", "K/V memory in use."),
    gauge("kv_bytes_budget", "kv_cache_bytes_budget", "K/V memory that there is."),
    counter("rows_prefilled", "prefill_tokens", "Prompt tokens whose rows were computed."),
    counter("tokens_generated", "generated_tokens", "Tokens drawn."),
    counter("prompts_covered", "prompts_covered", "Turns whose first token needed no forward pass."),
    counter("engine_steps", "engine_steps", "Forward passes."),
    gauge("stalled_seconds", "engine_stalled_seconds", "Since the engine last finished a step while it had work."),
    gauge("prefill_tokens_per_second", "prefill_tokens_per_second", "Latest rate."),
    gauge("decode_tokens_per_second", "decode_tokens_per_second", "Latest rate."),
    gauge("restore_bytes_per_second", "restore_bytes_per_second", "Latest rate."),
    gauge("store_ok", "store_up", "1 while the snapshot store can be used."),
    counter("snapshots_published", "snapshots_published", "Snapshots written."),
    counter("snapshots_failed", "snapshots_failed", "Snapshots that could not be written."),
    counter("snapshots_refused", "snapshots_refused", "Snapshots that did not verify, and were recomputed."),
    counter("blocks_audited", "restored_blocks_audited", "Blocks of restored rows computed again in idle time."),
    counter("blocks_wrong", "restored_blocks_wrong", "Those whose bits differed: an alarm."),
    counter("tokens_proposed", "speculated_tokens", "Tokens proposed and verified."),
    counter("tokens_accepted", "speculated_tokens_accepted", "Those that were right."),
)

OF_STORE: Final = (
    counter("bytes_saved", "saved_bytes", "Bytes of snapshots written."),
    counter("bytes_restored", "restored_bytes", "Bytes of rows read from snapshots."),
    counter("files_evicted", "store_files_evicted", "Files that this node removed to make room."),
    counter("files_refused", "store_files_refused", "Files found damaged, forged, or of something else."),
    counter("files_quarantined", "store_files_quarantined", "Those of them that were put into quarantine."),
)

SKIPPED: Final = {
    "no_room": "saves_without_room",
    "write_budget": "saves_over_write_budget",
    "not_worth_it": "saves_not_worth_it",
}
"""Why a save did not happen, and the field of StoreFigures that counts it."""


class NodeMetrics(Collector):
    """Reads what other threads write: single values, each whole. `clock`: seconds that do not jump."""

    def __init__(self, state: NodeState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Nothing of the engine before it has loaded."""
        now = self._clock()
        is_ready = self._state.serving is not None and not (self._state.fence.draining or self._state.hangs)
        yield value("node_ready", "1 once the engine has warmed up, until it drains; 0 while it hangs.", is_ready)
        yield value("node_uptime_seconds", "Since the process started.", now - self._state.started_at)
        yield self._state.loop_lag.metric()
        yield labelled_counter(
            "turns_refused", "Turns that were not admitted, by code.", "code", dict(self._state.refusals)
        )
        yield value("turns_queued_limit", "Turns that may wait at once.", self._state.config.max_queued)
        if (ends_at := self._state.fence.lease_ends_at) is not None:
            yield value("lease_remaining_seconds", "Until the last lease ends; below 0 it has.", ends_at - now)
        serving = self._state.serving
        if serving is None:
            return
        identity = serving.identity
        yield info(
            "node", "Who this is.",
            {"node": self._state.config.node_id, "version": identity.version, "model": identity.model,
             "fingerprint": identity.fingerprint, "kernel_path": identity.kernel_path},
        )  # fmt: skip
        yield value("resident_sessions", "Sessions with rows in memory.", len(serving.engine.view.resident))
        load = serving.load(now)
        yield from of_message(load, OF_LOAD)
        if load.HasField("store"):
            yield from self._of_store(load.store)

    def _of_store(self, figures: common_pb2.StoreFigures) -> Iterator[Metric]:
        yield from of_message(figures, OF_STORE)
        skipped = {reason: float(getattr(figures, field)) for reason, field in SKIPPED.items()}
        yield labelled_counter("saves_skipped", "Saves that did not happen, by reason.", "reason", skipped)
        yield value("store_budget_bytes", "Size the store may grow to.", int(self._state.config.store_max_bytes))
        if figures.HasField("write_budget_left"):
            yield value("write_budget_left_bytes", "What may still be written in this hour.", figures.write_budget_left)
        yield from self._state.store_watch.collect()
