"""A FleetService that stands in for the coordinator: real gRPC, no routing, and switches to misbehave."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Any

import grpc
from free_ports import free_port

from kvferry.proto.channel import server_options
from kvferry.proto.status import trailing_metadata
from kvferry.proto.v1 import fleet_pb2, fleet_pb2_grpc

LEASE_SECONDS, HEARTBEAT_SECONDS = 10.0, 0.2
SILENCE_SECONDS = 1.0  # a heartbeat waits no longer
# From a note to its answer: a test that takes what was asked for what was answered fails always, and not once a month.
ANSWER_SECONDS = 0.1


class StandInCoordinator(fleet_pb2_grpc.FleetServiceServicer):
    """Records what nodes say. `silent` lets heartbeats time out; `forget` asks a node to register again;
    `refusal` is said to whoever wants to register. The lease is one that a busy machine does not end."""

    def __init__(self, generation: int = 1, port: int | None = None) -> None:
        self.lease_seconds = LEASE_SECONDS
        self.generation = generation
        self.silent = False
        self.forget = False
        self.refusal = ""
        self.answer_seconds = ANSWER_SECONDS
        self.registered: list[fleet_pb2.RegisterRequest] = []
        self.heartbeats: list[fleet_pb2.HeartbeatRequest] = []
        self.deregistered: list[fleet_pb2.DeregisterRequest] = []
        self._changed = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=server_options())
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server)
        self.port = port or free_port()
        assert self._server.add_insecure_port(self.address) == self.port
        self._server.start()

    @property
    def address(self) -> str:
        """For --coordinator."""
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End at once."""
        self._server.stop(None).wait()

    def give_lease(self, seconds: float) -> None:
        """Have the node register again, for a lease of that length; returns when it has it."""
        n_before = len(self.registered)
        self.lease_seconds = seconds
        self.forget = True
        self.wait_for(f"len(registered) > {n_before}")
        self.wait_for(f"len(heartbeats) > {len(self.heartbeats)}")  # a node beats after it took its lease

    def wait_for(self, condition: str, seconds: float = 20.0) -> None:
        """Until an expression over registered, heartbeats and deregistered holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: eval(condition, vars(self)), seconds), condition  # noqa: S307

    def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterResponse:  # noqa: N802 - the wire
        """Let everybody in, unless told why not."""
        if self.refusal:
            context.set_trailing_metadata(trailing_metadata("node_id_taken"))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        self.forget = False  # first: who waits for the note may ask for the next one
        self._note(self.registered, request)
        return fleet_pb2.RegisterResponse(
            coordinator_generation=self.generation,
            lease_seconds=self.lease_seconds,
            heartbeat_seconds=HEARTBEAT_SECONDS,
        )

    def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Any) -> fleet_pb2.HeartbeatResponse:  # noqa: N802 - the wire
        """Renew, unless told otherwise."""
        if self.silent:
            time.sleep(SILENCE_SECONDS)
            context.abort(grpc.StatusCode.UNAVAILABLE, "silent")
        self._note(self.heartbeats, request)
        return fleet_pb2.HeartbeatResponse(coordinator_generation=self.generation, register_again=self.forget)

    def Deregister(self, request: fleet_pb2.DeregisterRequest, context: Any) -> fleet_pb2.DeregisterResponse:  # noqa: N802 - the wire
        """Good-bye."""
        self._note(self.deregistered, request)
        return fleet_pb2.DeregisterResponse()

    def _note(self, requests: list[Any], request: Any) -> None:
        with self._changed:
            requests.append(request)
            self._changed.notify_all()
        time.sleep(self.answer_seconds)
