"""One RunTurn call as both sides see it: messages in order on a connection that may be cut, frozen, or broken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.coordinator.transport import PlacementLost, loss_of
from kvferry.coordinator.turn import Blame, Loss
from kvferry.proto.status import status_of
from kvferry.proto.v1 import worker_pb2
from kvferry.simulator.network import Network

Item = worker_pb2.RunTurnResponse | PlacementLost | None
"""A message, how it ended badly, or that it ended well."""


class Stream:
    """Node to coordinator. Unbounded here: a turn has at most its tokens."""

    def __init__(self, network: Network, node: str, coordinator: str, reorders: Callable[[], bool]) -> None:
        self.is_closed = False
        # The node has heard that the call is cancelled.
        self.is_hung_up = False
        self.duplicated = False
        self._network = network
        self._ends = node, coordinator
        self._reorders = reorders
        self._arrived: asyncio.Queue[Item] = asyncio.Queue()
        self._sending: list[Item] = []
        self._sender: asyncio.Task[None] | None = None

    def send(self, item: Item) -> None:
        """From the node; arrives later, in order, unless the network reorders."""
        if self.is_closed:
            self._network.sometimes["a zombie spoke to nobody"] += isinstance(item, worker_pb2.RunTurnResponse)
            return
        copies = self._network.n_copies() if isinstance(item, worker_pb2.RunTurnResponse) else 1
        self.duplicated |= copies > 1
        if self._sending and self._reorders() and isinstance(item, worker_pb2.RunTurnResponse):
            self._sending[-1:-1] = [item]
        else:
            self._sending.extend([item] * copies)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send_all())

    def fail(self, code: str, details: str) -> None:
        """An error status of the node."""
        self.send(PlacementLost(loss_of(code, status_of(code), details), connection_broke=False))

    def break_off(self, why: str) -> None:
        """The process at the other end is gone, and its kernel says so."""
        self.send(PlacementLost(Loss(cause="broken_stream", detail=why, blame=Blame.TURN), connection_broke=True))

    async def receive(self) -> Item:
        return await self._arrived.get()

    async def _send_all(self) -> None:
        while self._sending:
            await self._network.carry(*self._ends)
            batch, self._sending = self._sending, []
            for item in batch:
                self._arrived.put_nowait(item)
