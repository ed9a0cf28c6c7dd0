"""The node's side of FleetService: join, heartbeat, keep the lease, leave. Event loop only.

With several coordinators, each has the node as a member of its fleet, and knows nothing of the others' heartbeats. A
lease counts from the moment a heartbeat was sent. When it ends, the turns of that coordinator are stopped by a task of
their own, whatever the network does meanwhile; the coordinator has given them to somebody else by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Final

import grpc

from kvferry.node.errors import LeaseLost, StaleCoordinator
from kvferry.node.messages import StopRun
from kvferry.node.state import NodeState, Serving
from kvferry.node.wire import resident_messages, snapshot_message
from kvferry.proto.status import CODE_KEY
from kvferry.proto.v1 import fleet_pb2, fleet_pb2_grpc
from kvferry.trust.doors import Channels
from kvferry.trust.tls_folder import TlsFolder

log = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS: Final = 1.0
"""Of a heartbeat; never more than a third of the lease, so that two may fail before it ends."""

RETRY_SECONDS: Final = (0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to reach the coordinator, the last one for ever: a rebooted one is found within a second."""

DEREGISTER_TIMEOUT_SECONDS: Final = 1.0

LOOK_SECONDS: Final = 0.2
"""Between looks at leases, at most."""

AWAY: Final = "is not there, trying on: "


@dataclass(slots=True)
class _Terms:
    lease_seconds: float
    heartbeat_seconds: float

    @property
    def call_timeout(self) -> float:
        return min(CALL_TIMEOUT_SECONDS, self.lease_seconds / 3)


class Memberships:
    """Keeps one node in the fleets of all its coordinators. `run` is its whole life; cancel it to stop."""

    def __init__(self, state: NodeState, address: str, tls: TlsFolder | None = None) -> None:
        """``address``: of the node, as coordinators reach it; ``tls``: its certificate, None: plaintext."""
        self._state = state
        self._memberships = [Membership(coordinator, state, address, tls) for coordinator in state.config.coordinators]

    async def run(self) -> None:
        """Be a member everywhere, and keep the leases."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_leases())
            for membership in self._memberships:
                tasks.create_task(membership.run())

    def beat_now(self) -> None:
        """Something changed that coordinators should know soon."""
        for membership in self._memberships:
            membership.beat_now()

    async def leave(self) -> None:
        """Say good-bye everywhere."""
        await asyncio.gather(*(membership.leave() for membership in self._memberships))

    async def _watch_leases(self) -> None:
        """Stop the turns of a coordinator whose lease has ended."""
        fence = self._state.fence
        while True:
            now = time.monotonic()
            lost = [turn for turn in self._state.running_turns() if fence.lease_lost(now, turn.coordinator)]
            for turn in lost:
                error = LeaseLost("this node has not heard its coordinator for a whole lease and lets go of its turns")
                self._state.ready().engine.send(StopRun(turn.run_id, error))
            if lost:
                log.warning("a lease ended: %d turns of that coordinator are stopped", len(lost))
            ends_at = fence.next_lease_end(now)
            # another lease, given meanwhile, may end before this one
            await asyncio.sleep(LOOK_SECONDS if ends_at is None else min(LOOK_SECONDS, ends_at - now))


class Membership:
    """Keeps one node in one coordinator's fleet. `run` is its whole life; cancel it to stop."""

    def __init__(self, coordinator: str, state: NodeState, address: str, tls: TlsFolder | None) -> None:
        self._coordinator = coordinator
        self._tls = tls
        self._instance = ""  # of the coordinator that gave the lease
        self._n_told = 0  # of published snapshots
        self._state = state
        self._address = address
        self._terms: _Terms | None = None  # None: not registered, as far as we know
        self._asked_to_join = False
        self._beat_now = asyncio.Event()
        self._n_failures = 0
        self._told = ""

    async def run(self) -> None:
        """Reach the coordinator, stay with it, and start over with a fresh connection when that ends."""
        while True:
            async with contextlib.aclosing(Channels(self._tls)) as channels:
                await self._stay(channels)
            pause = RETRY_SECONDS[min(self._n_failures, len(RETRY_SECONDS)) - 1]
            await asyncio.sleep(pause)

    def beat_now(self) -> None:
        """Something changed that the coordinator should know soon."""
        self._beat_now.set()

    async def leave(self) -> None:
        """Say good-bye; not being heard is no error."""
        if not self._asked_to_join:
            return
        identity = self._state.ready().identity
        request = fleet_pb2.DeregisterRequest(node_id=self._state.config.node_id, boot_id=identity.boot_id)
        async with contextlib.aclosing(Channels(self._tls)) as channels:
            stub = fleet_pb2_grpc.FleetServiceStub(channels.to(self._coordinator))
            try:
                await stub.Deregister(request, timeout=DEREGISTER_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.warning("could not take leave of the coordinator at %s: %s", self._coordinator, error.code().name)

    async def _stay(self, channels: Channels) -> None:
        """Register if need be, then heartbeat until a call fails."""
        try:
            while True:
                stub = fleet_pb2_grpc.FleetServiceStub(channels.to(self._coordinator))
                if self._terms is None:
                    await self._register(stub)
                else:
                    await self._heartbeat(stub, self._terms)
                self._n_failures, self._told = 0, ""
                await self._pause()
        except (grpc.aio.AioRpcError, StaleCoordinator) as error:
            self._n_failures += 1
            what, why = _trouble(error)
            # Not once a second for as long as it lasts; gRPC has many words for a coordinator that is away.
            trouble = what if what == AWAY else f"{what}{why}"
            if trouble != self._told:
                self._told = trouble
                log.warning("the coordinator at %s %s%s", self._coordinator, what, why)

    async def _pause(self) -> None:
        seconds = self._terms.heartbeat_seconds if self._terms else 0.0
        try:
            await asyncio.wait_for(self._beat_now.wait(), seconds)
        except TimeoutError:
            return
        self._beat_now.clear()

    async def _register(self, stub: fleet_pb2_grpc.FleetServiceAsyncStub) -> None:
        serving = self._state.ready()
        asked_at = time.monotonic()
        self._asked_to_join = True  # from here on it may have us as a member, whether or not its answer arrives
        response = await stub.Register(self._registration(serving, asked_at), timeout=CALL_TIMEOUT_SECONDS)
        self._state.fence.see_generation(response.coordinator_generation)
        self._terms = _Terms(response.lease_seconds, response.heartbeat_seconds)
        if response.coordinator_instance != self._instance:
            self._state.fence.forget_lease(self._instance)
            self._instance, self._n_told = response.coordinator_instance, 0
        self._state.fence.renew_lease(asked_at, response.lease_seconds, self._instance)
        log.info("joined the coordinator at %s as %s", self._coordinator, self._address)

    async def _heartbeat(self, stub: fleet_pb2_grpc.FleetServiceAsyncStub, terms: _Terms) -> None:
        serving = self._state.ready()
        asked_at = time.monotonic()
        published, n_told = serving.engine.core.memory.publisher.published_since(self._n_told)
        request = fleet_pb2.HeartbeatRequest(
            node_id=self._state.config.node_id,
            boot_id=serving.identity.boot_id,
            load=serving.load(asked_at),
            resident=resident_messages(serving.engine.view),
            published=[snapshot_message(snapshot, serving.identity.fingerprint) for snapshot in published],
            draining=self._state.fence.draining,
        )
        response = await stub.Heartbeat(request, timeout=terms.call_timeout)
        self._state.fence.see_generation(response.coordinator_generation)
        if response.register_again:
            self._terms = None
            return
        self._n_told = n_told
        self._state.fence.renew_lease(asked_at, terms.lease_seconds, self._instance)

    def _registration(self, serving: Serving, now: float) -> fleet_pb2.RegisterRequest:
        identity, config = serving.identity, self._state.config
        return fleet_pb2.RegisterRequest(
            node_id=config.node_id,
            boot_id=identity.boot_id,
            address=self._address,
            version=identity.version,
            model=identity.model,
            fingerprint=identity.fingerprint,
            tokenizer_digest=identity.tokenizer_digest,
            geometry=identity.geometry,
            context_length=identity.context_length,
            max_running=config.max_running,
            n_threads=identity.n_threads,
            kernel_path=identity.kernel_path,
            load=serving.load(now),
            resident=resident_messages(serving.engine.view),
            vocabulary_size=identity.model_config.vocab_size,
            sees_images=identity.vision is not None,
            bytes_per_row=identity.bytes_per_row,
            pid=os.getpid(),
        )


def _trouble(error: grpc.aio.AioRpcError | StaleCoordinator) -> tuple[str, str]:
    """What the coordinator does instead of having us, and why: it is away, it refuses us, or we refuse it."""
    if isinstance(error, StaleCoordinator):
        return "is not obeyed, trying on: ", str(error)
    if CODE_KEY in dict(error.trailing_metadata() or ()):
        return "refuses this node, trying on: ", error.details() or "without a reason"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "is none, trying on: ", "something else serves there"
    return AWAY, error.details() or error.code().name
