"""What a node tells a monitor: its engine, its memory, its store. Names are stable: docs/metrics.md lists them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvferry.node.state import NodeState
from kvferry.telemetry.families import counter, gauge, info, labelled, of_message, value

THERMAL: Final = Path("/sys/class/thermal")

OF_LOAD: Final = (
    gauge("n_running", "turns_running", "Turns in the batch."),
    gauge("n_queued", "turns_queued", "Turns that wait for a place in it, or for rows."),
    gauge("kv_bytes_used", "kv_cache_bytes_used", "K/V memory in use."),
    gauge("kv_bytes_budget", "kv_cache_bytes_budget", "K/V memory that there is."),
    counter("rows_prefilled", "prefill_tokens", "Prompt tokens whose rows were computed."),
    counter("tokens_generated", "generated_tokens", "Tokens drawn."),
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


class NodeMetrics(Collector):
    """Reads what other threads write: single values, each whole. `clock`: seconds that do not jump."""

    def __init__(self, state: NodeState, clock: Callable[[], float] = time.monotonic, thermal: Path = THERMAL) -> None:
        self._state = state
        self._clock = clock
        self._thermal = thermal

    def collect(self) -> Iterator[Metric]:
        """Nothing of the engine before it has loaded."""
        now = self._clock()
        is_ready = self._state.serving is not None and not self._state.fence.draining
        yield value("node_ready", "1 once the engine has warmed up, and until it drains.", is_ready)
        yield value("node_uptime_seconds", "Since the process started.", now - self._state.started_at)
        yield labelled(
            "event_loop_lag_seconds", "How late the event loop woke in the last half minute.", "quantile",
            self._state.loop_lag.summary().by_quantile(),
        )  # fmt: skip
        yield labelled("temperature_celsius", "Of a thermal zone.", "zone", self._temperatures())
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
        yield from of_message(serving.load(now), OF_LOAD)

    def _temperatures(self) -> dict[str, float]:
        """Of the board's thermal zones; none where the kernel has none."""
        found: dict[str, float] = {}
        for zone in sorted(self._thermal.glob("thermal_zone*")):
            try:
                found[(zone / "type").read_text().strip()] = int((zone / "temp").read_text()) / 1000
            except (OSError, ValueError):  # a sensor that is asleep
                continue
        return found
