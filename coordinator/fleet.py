"""The fleet as the event loop sees it: ``Membership`` with a clock, a bell, and our own counts of placements."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from kvferry.coordinator.errors import NoVision
from kvferry.coordinator.forecasts import Awaiting, Forecasts
from kvferry.coordinator.membership import Load, LostNode, Member, Membership, Node, NodeState
from kvferry.coordinator.prediction import Prediction
from kvferry.coordinator.registry import TokenArray
from kvferry.coordinator.routing import View
from kvferry.coordinator.tasks import Bell


class Fleet:
    """All methods from the event loop. ``changed`` rings whenever a decision could come out otherwise."""

    def __init__(self, lease_seconds: float, stall_seconds: float, clock: Callable[[], float]) -> None:
        self.lease_seconds = lease_seconds
        # Six beats a lease: half a lease, the suspicion, is three beats missed.
        self.heartbeat_seconds = lease_seconds / 6
        self.changed = Bell()
        self.forecasts = Forecasts()
        self._clock = clock
        self._membership = Membership(lease_seconds, self.heartbeat_seconds / 2, stall_seconds)
        self._n_placed: Counter[str] = Counter()
        # Turns that a node counted in its last heartbeat beyond ours: other coordinators'.
        self._n_others: dict[str, int] = {}
        self._states: dict[tuple[str, str], NodeState] = {}

    def register(self, node: Node) -> str | None:
        """Raises NodeIdTaken. Returns the boot that was replaced."""
        replaced = self._membership.register(node, self._clock())
        self._note_load(node.node_id, node.load)
        self.changed.ring()
        return replaced

    def heartbeat(self, node_id: str, boot_id: str, load: Load, resident: Mapping[str, int], *, draining: bool) -> bool:
        """False when the node has to register (again)."""
        known = self._membership.heartbeat(node_id, boot_id, load, resident, draining, self._clock())
        if known and (member := self._membership.member(node_id, self._clock())) is not None:
            self.forecasts.heard(member.node, resident)
            self._note_load(node_id, load)
        self._ring_if_states_changed()
        return known

    def deregister(self, node_id: str, boot_id: str) -> None:
        self._membership.deregister(node_id, boot_id)
        self.changed.ring()

    def stream_broke(self, node: Node) -> None:
        self._membership.stream_broke(node.node_id, node.boot_id)
        self.changed.ring()

    def note_resident(self, node: Node, session_id: str, token_ids: TokenArray) -> None:
        """The node holds the rows of these tokens, int32 [n]; known before its next heartbeat says so."""
        self._membership.note_resident(node.node_id, node.boot_id, session_id, len(token_ids))
        self.forecasts.remembers(node, session_id, token_ids)

    def members(self) -> tuple[Member, ...]:
        return self._membership.members(self._clock())

    def serving(self, model: str) -> list[Node]:
        """The nodes of a model that are not dead."""
        return [m.node for m in self.members() if m.node.model == model and m.state is not NodeState.DEAD]

    def check_sight(self, model: str) -> None:
        """Raises NoVision when the model has nodes, and none of them could ever take a turn with images."""
        nodes = self.serving(model)
        if nodes and not any(node.sees_images for node in nodes):
            raise NoVision("no node of this cluster has a vision tower: send text only, or start nodes that see")

    def boots(self, *states: NodeState) -> set[str]:
        """The boots of all nodes in these states."""
        return {member.node.boot_id for member in self.members() if member.state in states}

    def view(self, n_stored: Mapping[str, int], token_ids: TokenArray) -> View:
        """For a request with these tokens, int32 [n]."""
        # After a sleep of ours the silence is not the nodes'; and what a decision saw has to be what the bell knows, or
        # whoever waits because of it is never woken when it is no longer so.
        self._membership.tick(self._clock())
        self._ring_if_states_changed()
        members = self.members()
        nodes = {member.node.node_id: member.node for member in members}
        return View(
            members=members,
            n_turns={node_id: self.n_turns(node_id) for node_id in nodes},
            n_stored=n_stored,
            n_shared=self.forecasts.shared(nodes.values(), token_ids),
            coming=self.forecasts.coming(nodes.values(), token_ids, self._clock()),
            forecasts=self.forecasts.of(nodes, self._clock()),
        )

    def n_turns(self, node_id: str) -> int:
        """On the node: ours as of now, others' as of its last heartbeat."""
        return self._n_placed[node_id] + self._n_others.get(node_id, 0)

    def _note_load(self, node_id: str, load: Load) -> None:
        self._n_others[node_id] = max(0, load.n_running + load.n_queued - self._n_placed[node_id])

    @contextlib.contextmanager
    def placement(self, node: Node, prediction: Prediction, token_ids: TokenArray) -> Iterator[Awaiting]:
        """Counts a turn as the node's for as long as it is there."""
        awaiting = self.forecasts.placed(node, prediction, self.n_turns(node.node_id), self._clock(), token_ids)
        self._n_placed[node.node_id] += 1
        try:
            yield awaiting
        finally:
            self.forecasts.over(awaiting, self._clock())
            self._n_placed[node.node_id] -= 1
            self._n_placed += Counter()  # drops zeros

    def why_lost(self, node: Node) -> LostNode | None:
        """Why turns on this boot of the node have to move, or None when they may stay."""
        return self._membership.why_lost(node.node_id, node.boot_id, self._clock())

    async def until_lost(self, node: Node) -> None:
        """Returns when turns on this boot of the node have to move."""
        while True:
            seen = self.changed.count
            if self.why_lost(node) is not None:
                return
            await self.changed.wait(seen)

    async def run(self) -> None:
        """Watches the clock, since silence is no event."""
        while True:
            self._membership.tick(self._clock())
            self._ring_if_states_changed()
            await asyncio.sleep(self.heartbeat_seconds / 2)

    def _ring_if_states_changed(self) -> None:
        states = {(m.node.node_id, m.node.boot_id): m.state for m in self.members()}
        if states != self._states:
            self._states = states
            self.changed.ring()
