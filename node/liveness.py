"""Whether a node gets on, as its watchdog asks, and what it says about itself meanwhile. Any thread may ask."""

from __future__ import annotations

from typing import Final

from kvferry.node.engine_thread import EngineThread
from kvferry.node.state import NodeState
from kvferry.telemetry.watchdog import Check

UNKNOWN_STEP_SECONDS: Final = 120.0
"""For a step whose like was not made yet: weights are read from an SD card, or a board throttles under 512 rows."""


def engine_check(engine: EngineThread) -> Check:
    """Whether the engine's thread comes around: idle once a second, and busy after each step, which may take as long as
    honest steps do (step_limit.py)."""

    def check(now: float, patience: float) -> str:
        view = engine.view
        longest = (view.stall_limit_seconds or UNKNOWN_STEP_SECONDS) if view.is_busy else 0.0
        silent = now - engine.beat_at
        return f"the engine has not come around for {silent:.0f} s" if silent > max(patience, longest) else ""

    return check


def describe(state: NodeState) -> str:
    """One line for whoever asks the service manager."""
    serving = state.ready()
    view = serving.engine.view
    doing = "drains" if state.fence.draining else "serves"
    store = f"; store: {error}" if (error := serving.store_error()) else ""
    return f"{doing}: {view.n_running} turns run, {view.n_queued} wait, {len(view.resident)} sessions in memory{store}"
