"""How the coordinator reaches nodes: a contract, and its gRPC implementation. A simulator brings another.

This is where gRPC's statuses become the words of ``turn.py``: ``PlacementLost`` with a cause and a blame.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Final, Protocol

import grpc
import grpc.aio

from kvferry.coordinator.turn import Blame, Loss
from kvferry.proto.status import CODE_KEY
from kvferry.proto.v1 import worker_pb2, worker_pb2_grpc
from kvferry.telemetry import tracing
from kvferry.trust.doors import Channels
from kvferry.trust.tls_folder import TlsFolder

CONNECT_SECONDS: Final = 1.0
"""A node on the same LAN connects in milliseconds; channels to known nodes are open already."""

SHORT_CALL_SECONDS: Final = 2.0
"""StopTurn and DropSession only set a flag on the node."""

Messages = AsyncGenerator[worker_pb2.RunTurnResponse, None]


class PlacementLost(Exception):
    """A node's stream ended before the answer did."""

    def __init__(self, loss: Loss, *, connection_broke: bool) -> None:
        super().__init__(loss.detail)
        self.loss = loss
        self.connection_broke = connection_broke


class WorkerTransport(Protocol):
    """Calls to nodes by address."""

    def run_turn(
        self, address: str, request: worker_pb2.RunTurnRequest, timeout_seconds: float | None = None
    ) -> Messages:
        """The node's messages. Raises PlacementLost. Closing the iterator cancels the call, and so does the time."""

    async def stop_turn(self, address: str, request: worker_pb2.StopTurnRequest) -> None:
        """Best effort; never raises."""

    async def drop_session(self, address: str, session_id: str) -> None:
        """Best effort; never raises."""

    async def close(self) -> None: ...


LOSSES: Final[dict[str, tuple[str, Blame]]] = {
    "draining": ("draining", Blame.NODE),
    "lease_lost": ("lease_expired", Blame.NODE),
    "starting": ("refused", Blame.NODE),
    "slow_client": ("refused", Blame.NODE),
    "stale_epoch": ("refused", Blame.NODE),
    "stale_coordinator": ("refused", Blame.NODE),
    "queue_full": ("refused", Blame.CAPACITY),
    "out_of_kv_memory": ("refused", Blame.CAPACITY),
    "internal": ("broken_stream", Blame.TURN),
}
"""A node's error code → what a user is told, and whom it speaks against."""


def loss_of(code: str, status: grpc.StatusCode, details: str) -> Loss:
    """What a node's error means for the turn."""
    if code in LOSSES:
        cause, blame = LOSSES[code]
        # What a turn that never finds room fails with is the node's own word for it.
        final_code = code if blame is Blame.CAPACITY else "placements_exhausted"
        return Loss(cause=cause, detail=f"{code}: {details}", blame=blame, code=final_code)
    if code and status in {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }:
        return Loss(cause="refused", detail=f"{code}: {details}", blame=Blame.TURN, code=code)
    return Loss(cause="broken_stream", detail=f"{status.name}: {details}", blame=Blame.TURN)


class GrpcTransport:
    """One channel per node address, kept open. All calls from the event loop."""

    def __init__(self, tls: TlsFolder | None = None) -> None:
        """``tls``: this coordinator's certificate; None: plaintext."""
        self._channels = Channels(tls)
        self._look_at = ", or its certificate is not believed" if tls is not None else ""

    async def run_turn(
        self, address: str, request: worker_pb2.RunTurnRequest, timeout_seconds: float | None = None
    ) -> Messages:
        await self._connect(address)
        call = self._stub(address).RunTurn(request, timeout=timeout_seconds, metadata=tracing.carried())
        finished = False
        try:
            async for response in call:
                finished = response.HasField("finished")
                yield response
        except grpc.aio.AioRpcError as e:
            raise lost(e) from e
        finally:
            call.cancel()
        if not finished:
            ended = Loss(cause="broken_stream", detail="the stream ended without a finish", blame=Blame.TURN)
            raise PlacementLost(ended, connection_broke=False)

    async def stop_turn(self, address: str, request: worker_pb2.StopTurnRequest) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub(address).StopTurn(request, timeout=SHORT_CALL_SECONDS)

    async def drop_session(self, address: str, session_id: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub(address).DropSession(
                worker_pb2.DropSessionRequest(session_id=session_id), timeout=SHORT_CALL_SECONDS
            )

    async def close(self) -> None:
        await self._channels.aclose()

    async def _connect(self, address: str) -> None:
        """Tell a node that cannot be reached from one that breaks down over the turn."""
        why = f"no connection to {address} within {CONNECT_SECONDS:g} s"
        with contextlib.suppress(TimeoutError):
            if await self._channels.reach(address, CONNECT_SECONDS) is not None:
                return
            why = f"{address} refuses connections{self._look_at}"
        raise PlacementLost(Loss(cause="broken_stream", detail=why, blame=Blame.NODE), connection_broke=True)

    def _stub(self, address: str) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        return worker_pb2_grpc.WorkerServiceStub(self._channels.to(address))


def lost(error: grpc.aio.AioRpcError) -> PlacementLost:
    """A gRPC error as the end of a placement."""
    code = str(dict(error.trailing_metadata() or ()).get(CODE_KEY, ""))
    loss = loss_of(code, error.code(), error.details() or "no details")
    return PlacementLost(loss, connection_broke=not code and error.code() is grpc.StatusCode.UNAVAILABLE)
