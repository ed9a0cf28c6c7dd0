"""The real coordinator, from ``Turns`` down to ``route``, on a simulated network and a ledger that outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from kvferry.coordinator.errors import RegistryUnavailable
from kvferry.coordinator.fleet import Fleet
from kvferry.coordinator.fleet_service import FleetService
from kvferry.coordinator.memory_registry import Ledger, MemoryRegistry
from kvferry.coordinator.models import Models, ServedModel
from kvferry.coordinator.surroundings import Surroundings, T
from kvferry.coordinator.tasks import Background
from kvferry.coordinator.transport import CONNECT_SECONDS, PlacementLost
from kvferry.coordinator.turn import Blame, Loss, Phase, TurnPolicy
from kvferry.coordinator.turns import Turns
from kvferry.proto.v1 import worker_pb2
from kvferry.simulator.board import CONTEXT_LENGTH, Board
from kvferry.simulator.network import Network
from kvferry.simulator.store import SimulatedStore, StoreView
from kvferry.simulator.streams import Stream
from kvferry.simulator.text import SimulatedText

NAMES: Final = ("coordinator", "coordinator-2")
LEASE_S: Final = 3.0
STALL_S: Final = 6.0
REFRESH_S: Final = 30.0


async def here(function: Callable[[], T], /) -> T:
    """There are no threads on a virtual clock."""
    return function()


def no_grammar(grammar: str) -> None:
    """Simulated clients ask for none."""
    raise AssertionError(f"a simulated client asked for {grammar}")


class SimulatedTransport:
    """``coordinator.transport.WorkerTransport`` over the simulated network."""

    def __init__(
        self, name: str, network: Network, board_at: Callable[[str], Board | None], reorders: Callable[[], bool]
    ) -> None:
        self._name, self._network, self._board_at, self._reorders = name, network, board_at, reorders
        self.n_dropped_of: Callable[[worker_pb2.RunTurnRequest], int] = lambda _: 0

    async def run_turn(
        self, address: str, request: worker_pb2.RunTurnRequest, timeout_seconds: float | None = None
    ) -> AsyncGenerator[worker_pb2.RunTurnResponse, None]:
        del timeout_seconds  # simulated clients have all the time there is
        board = await self._connect(address)
        stream = Stream(self._network, board.node_id, self._name, self._reorders)
        self._network.later(self._name, board.node_id, lambda: board.accept(request, stream))
        try:
            while (item := await stream.receive()) is not None:
                if isinstance(item, PlacementLost):
                    raise item
                yield item
                if stream.duplicated and self.n_dropped_of(request):
                    self._network.sometimes["duplicate dropped"] += 1
        finally:
            stream.is_closed = True
            self._network.later(self._name, board.node_id, lambda: board.hang_up(stream))

    async def stop_turn(self, address: str, request: worker_pb2.StopTurnRequest) -> None:
        del address, request  # hanging up does the same

    async def drop_session(self, address: str, session_id: str) -> None:
        if (board := self._board_at(address)) is not None:
            await self._network.carry(self._name, board.node_id)
            board.drop(session_id)

    async def close(self) -> None:
        """Nothing is held."""

    async def _connect(self, address: str) -> Board:
        """As ``GrpcTransport``: an open connection to a frozen or cut board looks as good as any other."""
        board = self._board_at(address)
        why = f"{address} refuses connections"
        if board is None and self._network.is_cut(self._name, address.partition(":")[0]):
            await asyncio.sleep(CONNECT_SECONDS)
            why = f"no connection to {address}"
        if board is None:
            raise PlacementLost(Loss(cause="broken_stream", detail=why, blame=Blame.NODE), connection_broke=True)
        return board


class SimulatedCoordinator:
    """One life of a coordinator process."""

    def __init__(
        self, name: str, ledger: Ledger, network: Network, store: SimulatedStore, rng: random.Random,
        board_at: Callable[[str], Board | None], wall_offset_ms: Callable[[], int], reorders: Callable[[], bool],
        *, is_shared: bool,
    ) -> None:  # fmt: skip
        self.name = name
        loop = asyncio.get_running_loop()
        self.is_alive = False
        # A process that slept finds its monotonic clock further on.
        self.clock_ahead_s = 0.0
        self._rng, self._sometimes = rng, network.sometimes
        self.disk_fails = False
        self._registry = MemoryRegistry(ledger, self._disk, is_shared=is_shared)
        self._fleet = Fleet(LEASE_S, STALL_S, lambda: loop.time() + self.clock_ahead_s)
        self._view = StoreView(store)
        self._background = Background()
        self._transport = SimulatedTransport(name, network, board_at, reorders)
        self._models = Models([ServedModel.of(SimulatedText(), CONTEXT_LENGTH, check_grammar=no_grammar)])
        self._around = Surroundings(
            registry=self._registry, fleet=self._fleet, transport=self._transport, snapshots=self._view,
            background=self._background,
            clock=lambda: loop.time() + self.clock_ahead_s,
            wall_ms=lambda: int(loop.time() * 1000) + 10**12 + wall_offset_ms(),
            in_thread=here, settled=asyncio.Event(),
        )  # fmt: skip
        self.turns = Turns(
            self._models, self._around, TurnPolicy(), no_node_wait_seconds=2.0, max_open_turns=64,
            new_id=lambda: f"t{rng.getrandbits(64):016x}",
        )  # fmt: skip
        self._transport.n_dropped_of = self._n_dropped
        self._service: FleetService | None = None

    async def start(self) -> None:
        await self._registry.open("sim")
        self._service = FleetService(
            fleet=self._fleet, snapshots=self._view, generation=self._registry.generation,
            instance_id=self._registry.instance_id, models=self._models,
        )  # fmt: skip
        self._background.start(self._fleet.run(), "fleet")
        self._background.start(self._settle(), "settle")
        self._background.start(self._refresh(), "refresh")
        await self._registry.announce(self.name)
        await self.turns.recover()
        if self._registry.is_shared:
            self._background.start(self._keep_house(), "housekeeping")
        self.is_alive = True

    async def crash(self) -> None:
        """At whatever await its tasks are; only the ledger is left."""
        self.is_alive = False
        await self.turns.stop()
        await self._registry.close()
        await self._background.close()

    async def answer(self, method: str, request: Any) -> Any:
        """FleetService."""
        return await getattr(self._service, method)(request, None)

    @property
    def registry(self) -> MemoryRegistry:
        return self._registry

    def turns_between_nodes(self) -> int:
        """Turns that lost a node and have no other one yet."""
        live = (self.turns.live_turn(*key) for key in self.turns.open_keys())
        return sum(t is not None and t.phase is Phase.WAITING and bool(t.placements) for t in live)

    def _n_dropped(self, request: worker_pb2.RunTurnRequest) -> int:
        turn = self.turns.live_turn(request.session_id, request.turn_id)
        return 0 if turn is None else turn.n_dropped

    async def _disk(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0002, 0.004))
        if self.disk_fails:
            raise RegistryUnavailable("the disk is full")

    async def _settle(self) -> None:
        if not self._registry.is_new:
            await asyncio.sleep(2 * self._fleet.heartbeat_seconds)
        self._around.settled.set()

    async def _keep_house(self) -> None:
        """Take up what another coordinator left, as ``server.keep_house`` does."""
        while True:
            await asyncio.sleep(LEASE_S)
            with contextlib.suppress(RegistryUnavailable):
                if await self._registry.keeps_house() and await self.turns.recover():
                    self._sometimes["turn taken over from another coordinator"] += 1

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._view.refresh()
