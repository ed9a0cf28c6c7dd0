"""Who is in the fleet and how alive it is: a pure function of what was heard and of the time.

Theory of operation. Each node is heard by registering and by heartbeats. Its state is not stored, it follows from the
record:

    silent for a whole lease, or its engine has not finished
          a step for much longer than its steps take            dead        (its turns move)
    else: said that it drains                                   draining    (no new turns)
    else: silent for half a lease, or a stream of it broke      suspect     (no new turns)
          since it was last heard
    else                                                        live

Two thresholds, because a slow board that misses one beat should lose no running turn (reliability.md section 5). The
clock is an argument everywhere. Safety never depends on it: epochs fence, leases only decide when to move.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Final

from kvferry.coordinator.errors import NodeIdTaken
from kvferry.proto.v1 import common_pb2

MAX_NODES_REMEMBERED: Final = 1_024
"""Dead nodes are listed until this many are known; the design aims at fleets of up to some hundred boards."""

MAX_SUPERSEDED_BOOTS: Final = 64
"""Boots of one node id that were replaced by a later one, to tell a restarted node from two processes with one id."""

MISSED_TICKS: Final = 4
"""A clock that skipped this many ticks means that we slept, not that the fleet fell silent."""


class NodeState(enum.IntEnum):
    """The numbers are those of ``kvferry.v1.NodeState``."""

    LIVE = 1
    SUSPECT = 2
    DEAD = 3
    DRAINING = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A node's own counters, as of its last heartbeat."""

    n_running: int = 0
    n_queued: int = 0
    kv_bytes_used: int = 0
    kv_bytes_budget: int = 0
    tokens_generated: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    restore_bytes_per_second: float = 0.0
    store_ok: bool = True
    # It saves to another store than ours, so it cannot restore what ours has.
    other_store: bool = False
    # It seals what it saves with another key than we have, so neither it nor we can read what the other saved.
    other_key: bool = False
    # What it did with its store; None without one.
    store: common_pb2.StoreFigures | None = None
    # Since the engine last finished a step while it had work; 0 when idle.
    stalled_seconds: float = 0.0
    # From so long on it hangs, judged by its own steps; 0 while it cannot tell.
    stall_limit_seconds: float = 0.0
    # Of the board's hottest thermal zone; None where there is none.
    temperature_celsius: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node said about itself."""

    node_id: str
    # Differs for every start of the process.
    boot_id: str
    address: str
    # The coordinator's name for it.
    model: str
    fingerprint: str
    context_length: int
    max_running: int = 0
    n_threads: int = 0
    kernel_path: str = ""
    pid: int = 0
    # Of one token's K and V in all layers.
    bytes_per_row: int = 0
    load: Load = Load()
    # session_id -> rows in the node's memory
    resident: Mapping[str, int] = dataclasses.field(default_factory=dict)
    draining: bool = False
    sees_images: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node with its state at one moment."""

    node: Node
    state: NodeState
    silent_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class LostNode:
    """``cause``: one of those named in chat.proto's NodeLost. ``detail``: for a person."""

    cause: str
    detail: str


@dataclasses.dataclass(slots=True)
class _Entry:
    node: Node
    heard_s: float
    broken: bool = False
    superseded_boots: tuple[str, ...] = ()


class Membership:
    """The fleet. Times are seconds of any clock that does not jump; the same one in all calls. Not thread-safe."""

    def __init__(self, lease_seconds: float, tick_seconds: float, stall_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._stall_seconds = stall_seconds
        self._tick_seconds = tick_seconds
        self._ticked_s: float | None = None
        self._entries: dict[str, _Entry] = {}

    def register(self, node: Node, now_s: float) -> str | None:
        """Admit a node, or a new boot of it; returns the boot that it replaces, whose turns are lost.

        Raises NodeIdTaken for a boot that a later one has replaced: two processes use one id.
        """
        known = self._entries.get(node.node_id)
        if known is None:
            self._forget_dead(now_s)
            self._entries[node.node_id] = _Entry(node, now_s)
            return None
        if node.boot_id in known.superseded_boots:
            raise NodeIdTaken(
                f"node id {node.node_id} is used by a process that started later (at {known.node.address}): "
                "give each node its own --node-id"
            )
        if node.boot_id == known.node.boot_id:
            known.node, known.heard_s, known.broken = node, now_s, False
            return None
        replaced = known.node.boot_id
        boots = (*known.superseded_boots, replaced)[-MAX_SUPERSEDED_BOOTS:]
        self._entries[node.node_id] = _Entry(node, now_s, superseded_boots=boots)
        return replaced

    def heartbeat(
        self, node_id: str, boot_id: str, load: Load, resident: Mapping[str, int], draining: bool, now_s: float
    ) -> bool:
        """Renew a lease; False when this boot is not known (any more) and has to register."""
        entry = self._entries.get(node_id)
        if entry is None or entry.node.boot_id != boot_id:
            return False
        entry.node = dataclasses.replace(entry.node, load=load, resident=resident, draining=draining)
        entry.heard_s, entry.broken = now_s, False
        return True

    def deregister(self, node_id: str, boot_id: str) -> bool:
        """Forget a node that leaves in order; False when this boot is not known."""
        entry = self._entries.get(node_id)
        if entry is None or entry.node.boot_id != boot_id:
            return False
        del self._entries[node_id]
        return True

    def stream_broke(self, node_id: str, boot_id: str) -> None:
        """A connection to the node broke: it gets no turns until it is heard again."""
        entry = self._entries.get(node_id)
        if entry is not None and entry.node.boot_id == boot_id:
            entry.broken = True

    def note_resident(self, node_id: str, boot_id: str, session_id: str, n_rows: int) -> None:
        """What we know before the next heartbeat says it: the node holds these rows."""
        entry = self._entries.get(node_id)
        if entry is not None and entry.node.boot_id == boot_id:
            entry.node = dataclasses.replace(entry.node, resident={**entry.node.resident, session_id: n_rows})

    def tick(self, now_s: float) -> None:
        """Called every ``tick_seconds``. If it was not, this process slept: its nodes get that time back."""
        slept_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        if slept_s > MISSED_TICKS * self._tick_seconds:
            for entry in self._entries.values():
                entry.heard_s += min(slept_s, now_s - entry.heard_s)
        self._ticked_s = now_s

    def members(self, now_s: float) -> tuple[Member, ...]:
        """Everyone known, by node id."""
        return tuple(self._member(entry, now_s) for _, entry in sorted(self._entries.items()))

    def member(self, node_id: str, now_s: float) -> Member | None:
        """One of them."""
        entry = self._entries.get(node_id)
        return None if entry is None else self._member(entry, now_s)

    def why_lost(self, node_id: str, boot_id: str, now_s: float) -> LostNode | None:
        """Why turns on this boot have to move, or None when they may stay."""
        entry = self._entries.get(node_id)
        if entry is None:
            return LostNode("draining", "it left the fleet")
        if entry.node.boot_id != boot_id:
            return LostNode("broken_stream", "it was started anew")
        if self._hangs(entry.node.load):
            return LostNode("lease_expired", f"its engine hangs, no step for {entry.node.load.stalled_seconds:.0f} s")
        if self._member(entry, now_s).state is NodeState.DEAD:
            return LostNode("lease_expired", f"it was not heard for its whole lease of {self.lease_seconds:g} s")
        return None

    def _member(self, entry: _Entry, now_s: float) -> Member:
        silent_s = max(0.0, now_s - entry.heard_s)
        if silent_s >= self.lease_seconds or self._hangs(entry.node.load):
            state = NodeState.DEAD
        elif entry.node.draining:
            state = NodeState.DRAINING
        elif entry.broken or silent_s >= self.lease_seconds / 2:
            state = NodeState.SUSPECT
        else:
            state = NodeState.LIVE
        return Member(node=entry.node, state=state, silent_seconds=silent_s)

    def _hangs(self, load: Load) -> bool:
        """By the node's own measure, but not sooner than a silent one is given up, and no later than the setting says.

        Two ticks are a heartbeat, which the figure may be old.
        """
        own_s = max(load.stall_limit_seconds, self.lease_seconds - 2 * self._tick_seconds)
        limit_s = min(own_s, self._stall_seconds) if load.stall_limit_seconds else self._stall_seconds
        return load.stalled_seconds >= limit_s

    def _forget_dead(self, now_s: float) -> None:
        """Make room for a newcomer by forgetting who was silent longest."""
        if len(self._entries) < MAX_NODES_REMEMBERED:
            return
        dead = [m for m in self.members(now_s) if m.state is NodeState.DEAD]
        for member in sorted(dead, key=lambda m: -m.silent_seconds)[: len(self._entries) - MAX_NODES_REMEMBERED + 1]:
            del self._entries[member.node.node_id]

    def __repr__(self) -> str:
        return f"<Membership lease={self.lease_seconds:g}s nodes={sorted(self._entries)}>"
