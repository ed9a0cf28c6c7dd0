"""FleetService: what nodes call to join, to be counted as alive, and to leave."""

from __future__ import annotations

import dataclasses
import logging

from kvferry.coordinator import requests
from kvferry.coordinator.errors import BadRequest
from kvferry.coordinator.fleet import Fleet
from kvferry.coordinator.membership import Load
from kvferry.coordinator.models import Models, ServedModel
from kvferry.coordinator.snapshots import SnapshotNews
from kvferry.coordinator.wire import Context, load_of, node_of, resident_of, unary
from kvferry.proto.v1 import fleet_pb2, fleet_pb2_grpc
from kvferry.store.geometry import KvGeometry

logger = logging.getLogger(__name__)


def store_problem(load: Load) -> str:
    """Why the fleet does not share what a node saves, after the node's name; empty when it does."""
    if load.other_store:
        return (
            "saves to another store than the one this coordinator looks at: what it saves can be resumed only by nodes "
            "with the same --store; give all the same folder"
        )
    if load.other_key:
        return (
            "has another store key than this coordinator: what it saves can be resumed only by nodes with the same "
            "key; give all the same --store-key-file, and --store-encrypted to all or to none"
        )
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """All handlers run on the event loop and block nowhere."""

    fleet: Fleet
    snapshots: SnapshotNews
    generation: int
    instance_id: str
    models: Models
    _told_of_store: set[str] = dataclasses.field(default_factory=set)  # boots that were warned about

    @unary
    async def Register(self, request: fleet_pb2.RegisterRequest, context: Context) -> fleet_pb2.RegisterResponse:
        model = self._check(request)
        node = dataclasses.replace(node_of(request, self.snapshots.which_store()), model=model.name)
        replaced = self.fleet.register(node)
        g = request.geometry
        geometry = KvGeometry(g.n_layers, g.n_kv_heads, g.head_dim, g.block_size)
        self.snapshots.watch(request.fingerprint, geometry, request.vocabulary_size)
        logger.info(
            "node %s registered at %s (%s, fingerprint %s, %d resident sessions%s)",
            request.node_id, request.address, model.name, request.fingerprint, len(request.resident),
            ", a new start" if replaced else "",
        )  # fmt: skip
        return fleet_pb2.RegisterResponse(
            coordinator_generation=self.generation,
            lease_seconds=self.fleet.lease_seconds,
            heartbeat_seconds=self.fleet.heartbeat_seconds,
            coordinator_instance=self.instance_id,
        )

    @unary
    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Context) -> fleet_pb2.HeartbeatResponse:
        resident, load = resident_of(request.resident), load_of(request.load, self.snapshots.which_store())
        known = self.fleet.heartbeat(request.node_id, request.boot_id, load, resident, draining=request.draining)
        if known and (problem := store_problem(load)) and request.boot_id not in self._told_of_store:
            self._told_of_store.add(request.boot_id)
            logger.warning("node %s %s", request.node_id, problem)
        if known:
            for snapshot in request.published:
                self.snapshots.announce(snapshot.fingerprint, [snapshot.name], snapshot.namespace)
        return fleet_pb2.HeartbeatResponse(coordinator_generation=self.generation, register_again=not known)

    @unary
    async def Deregister(self, request: fleet_pb2.DeregisterRequest, context: Context) -> fleet_pb2.DeregisterResponse:
        self.fleet.deregister(request.node_id, request.boot_id)
        logger.info("node %s left", request.node_id)
        return fleet_pb2.DeregisterResponse()

    def _check(self, request: fleet_pb2.RegisterRequest) -> ServedModel:
        """The model that it serves. Raises InvalidName, BadRequest, ModelMismatch."""
        requests.name("node_id", request.node_id)
        if not request.boot_id or ":" not in request.address or not request.fingerprint or not request.context_length:
            raise BadRequest(
                "a node has to name its boot_id, its address (host:port), its fingerprint and its context_length"
            )
        # not the vocabulary's size: a model may have rows of padding that its tokenizer does not know
        return self.models.of_node(request.node_id, request.model, request.tokenizer_digest)
