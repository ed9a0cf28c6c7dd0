"""What the event loop of a node knows: who it is, who may ask, which turns are open. Event loop only."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.engine.config import ModelConfig, VisionConfig
from kvferry.node.config import NodeConfig
from kvferry.node.engine_thread import EngineThread
from kvferry.node.errors import QueueFull, SessionBusy, Starting
from kvferry.node.fencing import Fence
from kvferry.node.io_threads import IoThreads
from kvferry.node.messages import StoreNews
from kvferry.node.rules import Rules
from kvferry.node.store_watch import StoreWatch
from kvferry.node.thermometer import Thermometer
from kvferry.node.turns import Turn
from kvferry.node.vision_thread import VisionThread
from kvferry.node.wire import load_message
from kvferry.proto.v1 import common_pb2, worker_pb2
from kvferry.telemetry.loop_lag import LoopLag


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What is the same for the whole life of the process."""

    boot_id: str  # differs for every start
    version: str
    model: str
    model_config: ModelConfig
    fingerprint: str
    tokenizer_digest: str
    kernel_path: str
    weights: str  # where they lie and why, for a person
    n_threads: int
    cores: str  # that the engine's threads run on
    context_length: int
    vision: VisionConfig | None  # of the tower that works here
    geometry: common_pb2.KvGeometry
    bytes_per_row: int  # of one token's K and V in all layers, as the cache holds them


@dataclass(slots=True, kw_only=True)
class Serving:
    """A node that has loaded its model."""

    identity: Identity
    engine: EngineThread
    io: IoThreads | None
    vision: VisionThread | None
    rules: Rules
    close_engine: Callable[[], None]
    thermometer: Thermometer = field(default_factory=Thermometer)

    def store_error(self) -> str:
        """What is wrong with the store; empty when nothing is, or when there is none to go wrong."""
        return "" if self.io is None else self.io.error()

    def load(self, now: float) -> worker_pb2.NodeLoad:
        """The load at this moment."""
        store = StoreNews() if self.io is None else self.io.news()
        return load_message(self.engine.view, self.engine.core.totals, store, now, self.thermometer.hottest(now))


def _event_that_is_set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True, kw_only=True)
class NodeState:
    """See the module's description. `serving` is None until the engine has warmed up."""

    config: NodeConfig
    started_at: float
    fence: Fence = field(default_factory=Fence)
    serving: Serving | None = None
    hangs: str = ""  # says what does, if anything; by the watchdog
    idle: asyncio.Event = field(default_factory=_event_that_is_set)  # no turn is open
    loop_lag: LoopLag = field(default_factory=lambda: LoopLag(time.monotonic))
    store_watch: StoreWatch = field(default_factory=StoreWatch)
    refusals: Counter[str] = field(default_factory=lambda: Counter({QueueFull.code: 0}))  # of turns, by code
    _turns: dict[int, Turn] = field(default_factory=dict)  # by run id
    _run_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def ready(self) -> Serving:
        """The serving part; raises Starting before there is one."""
        if self.serving is None:
            raise Starting("this node is still loading its model; try again in a moment")
        return self.serving

    def next_run_id(self) -> int:
        """Unique in this process."""
        return next(self._run_ids)

    @property
    def n_turns(self) -> int:
        """Open turns."""
        return len(self._turns)

    def check_room(self, session_id: str, epoch: int) -> None:
        """Raises SessionBusy for a second run of one epoch, QueueFull when as many turns are open as may."""
        if any(t.session_id == session_id and t.epoch == epoch and not t.outbox.closed for t in self._turns.values()):
            raise SessionBusy(
                f"session {session_id} has a running turn of epoch {epoch}; stop it, or ask with a higher epoch"
            )
        n_most = self.config.max_running + self.config.max_queued
        if self.n_turns >= n_most:
            raise QueueFull(f"{self.n_turns} turns run or wait here, as many as may; try again, or another node")

    def open_turn(self, turn: Turn) -> None:
        """Count a turn."""
        self._turns[turn.run_id] = turn
        self.idle.clear()

    def close_turn(self, turn: Turn) -> None:
        """The caller has its end, or is gone."""
        del self._turns[turn.run_id]
        if not self._turns:
            self.idle.set()

    def running_turns(self) -> list[Turn]:
        """Open turns whose last event has not come."""
        return [turn for turn in self._turns.values() if not turn.outbox.closed]

    def find_turn(self, session_id: str, turn_id: str) -> Turn | None:
        """The open run of a turn with the highest epoch."""
        found = [t for t in self._turns.values() if t.session_id == session_id and t.turn_id == turn_id]
        return max(found, key=lambda turn: turn.epoch, default=None)
