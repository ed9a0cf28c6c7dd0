"""One coordinator process: put the parts together, serve, stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.errors import CannotListen, CannotStart, RegistryUnavailable
from kvferry.coordinator.fleet import Fleet
from kvferry.coordinator.fleet_service import FleetService
from kvferry.coordinator.forgetting import Forgetting, expire
from kvferry.coordinator.loaded_model import LoadedModel, load_all, served
from kvferry.coordinator.metrics import CoordinatorMetrics
from kvferry.coordinator.opening import open_registry
from kvferry.coordinator.ownership import Ownership
from kvferry.coordinator.peers import Peers
from kvferry.coordinator.registry import Registry
from kvferry.coordinator.routing import Rule, route
from kvferry.coordinator.service import ChatService
from kvferry.coordinator.snapshots import SnapshotView, check_store
from kvferry.coordinator.surroundings import Surroundings
from kvferry.coordinator.tasks import Background
from kvferry.coordinator.transport import GrpcTransport
from kvferry.coordinator.turn import Phase, TurnPolicy
from kvferry.coordinator.turns import Turns
from kvferry.proto.address import parse_address, why_not_listen
from kvferry.proto.channel import server_options
from kvferry.proto.malformed import MalformedRefused
from kvferry.proto.ready_file import why_not_written, write_ready_file
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc, fleet_pb2, fleet_pb2_grpc
from kvferry.telemetry.exposition import Exposition
from kvferry.telemetry.host import HostMetrics
from kvferry.telemetry.loop_lag import LoopLag
from kvferry.telemetry.pauses import keep_loaded
from kvferry.telemetry.service_manager import ServiceManager
from kvferry.telemetry.watchdog import Watchdog, loop_check
from kvferry.terminal.interrupts import means_at_once, stop_signals
from kvferry.trust.certificates import Role
from kvferry.trust.doors import bind, check_plaintext, has_reflection, open_folder
from kvferry.trust.guard import Guard
from kvferry.trust.interceptor import Guarded
from kvferry.trust.tls_folder import TlsFolder
from kvferry.trust.tokens import open_book

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS: Final = 4_096
"""Streams of all clients and heartbeats of all nodes; beyond it gRPC answers RESOURCE_EXHAUSTED at once."""

STOP_SECONDS: Final = 1.0
"""Calls that are open at the end get their status at once; this is for bytes on the way."""

START_SECONDS: Final = 120.0
"""For reading tokenizers from an SD card, and for a registry of years that is brought up to the newest version."""

CLOSE_SECONDS: Final = 15.0
"""For calls that are answered, and a registry that writes to a slow disk."""

UNREAD_SECONDS: Final = 10.0
"""How often turns that nobody reads are looked for."""

MISSED_PAUSES: Final = 2
"""A clock that skipped so many of them means that this process was stopped or slept: nobody could read meanwhile, and
whoever wants to has the whole limit again. At most half of it goes by unnoticed."""

EXPIRY_SECONDS: Final = 5.0
"""How often sessions that expired are looked for, in an index."""

CHAT_SERVICE: Final = chat_pb2.DESCRIPTOR.services_by_name["ChatService"].full_name
FLEET_SERVICE: Final = fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name


async def run(settings: CoordinatorSettings) -> None:
    """The whole life of a coordinator. Raises CannotStart, and what loading the model raises."""
    manager = ServiceManager()
    stop = stop_on_signals()
    check_plaintext(settings.listen, has_tls=settings.tls_dir is not None, is_allowed=settings.insecure_plaintext)
    check_store(settings.store_place)
    manager.starting("loads its tokenizers, and opens its registry", START_SECONDS)
    models = await asyncio.to_thread(load_all, settings.model, settings.image_tokens)
    loop_lag = LoopLag(time.monotonic)
    async with (
        open_registry(settings) as registry,
        serve(settings, models, registry, loop_lag=loop_lag) as address,
    ):
        names = ", ".join(model.text.model_name for model in models)
        logger.info("serving %s on %s, generation %d", names, address, registry.generation)
        keep_loaded()
        tell_ready(settings.ready_file, address, registry.coordinator_id)
        status = f"serves {names} at {address}"
        manager.ready(status)
        with Watchdog(manager, [loop_check(lambda: loop_lag.beat_at)], lambda: status):
            await stop.wait()
        logger.info("stopping")
        manager.stopping("closes its registry", CLOSE_SECONDS)


def tell_ready(path: Path | None, address: str, coordinator_id: str) -> None:
    """Raises CannotStart: whoever waits for the file would wait for ever."""
    if path is None:
        return
    try:
        write_ready_file(path, address, coordinator_id=coordinator_id)
    except OSError as e:
        raise CannotStart(why_not_written(path, e)) from e


@contextlib.asynccontextmanager
async def serve(
    settings: CoordinatorSettings,
    loaded: Sequence[LoadedModel],
    registry: Registry,
    rule: Rule = route,
    loop_lag: LoopLag | None = None,
) -> AsyncIterator[str]:
    """Serve on ``settings.listen``; yields the address with the real port.

    Raises CannotListen, InvalidSettings, TlsFolderInvalid, TokensInvalid.
    """
    models = served(loaded)
    tls = open_folder(settings.tls_dir, Role.COORDINATOR)
    clock = time.monotonic
    fleet = Fleet(settings.lease, settings.stall, clock)
    snapshots = SnapshotView(settings.store_place)
    transport, peers, background = GrpcTransport(tls), Peers(tls), Background()
    around = Surroundings(
        registry=registry, fleet=fleet, transport=transport, snapshots=snapshots, background=background,
        clock=clock, wall_ms=wall_ms, settled=asyncio.Event(), in_thread=asyncio.to_thread, rule=rule,
    )  # fmt: skip
    turns = Turns(
        models, around, TurnPolicy(max_losses=settings.max_losses, max_placements=settings.max_placements),
        no_node_wait_seconds=settings.no_node_wait, max_open_turns=settings.max_open_turns, sharing=settings.sharing,
    )  # fmt: skip
    guard = Guard(tls, open_book(settings.tokens))
    server = grpc.aio.server(
        interceptors=[Guarded(guard), MalformedRefused()],
        options=server_options(), maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
    )  # fmt: skip
    chat = ChatService(
        turns=turns, peers=peers, registry=registry, fleet=fleet, snapshots=snapshots, models=models,
        sharing=settings.sharing, started_s=clock(), clock=clock, wall_ms=wall_ms,
        ownership=Ownership(registry, lambda key: turns.live_turn(*key) is not None),
    )  # fmt: skip
    chat_pb2_grpc.add_ChatServiceServicer_to_server(chat, server)
    loop_lag = loop_lag or LoopLag(clock)
    metrics = CoordinatorMetrics(chat.status, lambda: n_waiting(turns), loop_lag, guard.refusals)
    turns.on_finished = metrics.turn_finished
    forgetting = Forgetting(registry, snapshots, settings.sharing, wall_ms)
    turns.on_deleted = forgetting.deleted
    exposition = Exposition(settings.metrics, metrics, HostMetrics("coordinator", settings.tls_dir))
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(
        FleetService(
            fleet=fleet, snapshots=snapshots, generation=registry.generation, instance_id=registry.instance_id,
            models=models,
        ), server,
    )  # fmt: skip
    health_servicer = add_health(server, has_reflection(settings.reflection, settings.listen, tls))
    address = listen(server, settings.listen, tls)
    try:
        snapshots.start()
        background.start(fleet.run(), "fleet")
        background.start(loop_lag.run(), "loop lag")
        background.start(forgetting.run(), "forgetting")
        background.start(settle(around.settled, grace_seconds(settings, fleet, is_new=registry.is_new)), "settle")
        await registry.announce(settings.advertised(address))
        await take_up(turns)
        background.start(keep_house(registry, turns, settings), "housekeeping")
        if settings.unread_limit:
            background.start(end_unread(turns, settings.unread_limit, clock), "unread")
        await server.start()
        exposition.start()
        await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await health_servicer.set(CHAT_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await health_servicer.set(FLEET_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        yield address
    finally:
        await health_servicer.enter_graceful_shutdown()
        await asyncio.to_thread(exposition.stop)  # a scrape may wait for this loop
        await turns.stop()
        await server.stop(STOP_SECONDS)
        await background.close()
        await transport.close()
        await peers.close()
        snapshots.stop()


def n_waiting(turns: Turns) -> int:
    """Turns that no node has; any thread: a turn that ends meanwhile counts or does not."""
    live = [turns.live_turn(*key) for key in turns.open_keys()]
    return sum(turn is not None and turn.phase is Phase.WAITING for turn in live)


def grace_seconds(settings: CoordinatorSettings, fleet: Fleet, *, is_new: bool) -> float:
    """How long nothing is placed: no time at the very first start, when no node can hold rows of ours."""
    if is_new and settings.grace is None:
        return 0.0
    return 2 * fleet.heartbeat_seconds if settings.grace is None else settings.grace


async def settle(settled: asyncio.Event, seconds: float) -> None:
    await asyncio.sleep(seconds)
    settled.set()


async def take_up(turns: Turns) -> None:
    """What no coordinator answers. Raises RegistryUnavailable."""
    if n_open := await turns.recover():
        logger.info("%d open turns are taken up again", n_open)


async def keep_house(registry: Registry, turns: Turns, settings: CoordinatorSettings) -> None:
    """What one coordinator does for all: end what others left, delete what is too old.

    A registry that fails is asked again later.
    """
    expire_s = settings.expire_days * 86_400
    next_expiry_s = time.monotonic()
    expiry_pause_s = min(EXPIRY_SECONDS, expire_s / 2) if expire_s else EXPIRY_SECONDS
    pause_s = min(settings.lease, expiry_pause_s) if registry.is_shared else expiry_pause_s
    while True:
        try:
            if await registry.keeps_house():
                if registry.is_shared:
                    await take_up(turns)
                if time.monotonic() >= next_expiry_s:
                    next_expiry_s = time.monotonic() + expiry_pause_s
                    before_ms = wall_ms() - int(expire_s * 1000) if expire_s else 0
                    while n := await expire(registry, turns, wall_ms(), before_ms):
                        logger.info("%d sessions were unused for as long as they may be, and are deleted", n)
        except RegistryUnavailable as e:
            logger.warning("there is no housekeeping at the moment: %s", e)
        await asyncio.sleep(pause_s)


async def end_unread(turns: Turns, limit_s: float, clock: Callable[[], float]) -> None:
    """A slot of a node is not for an answer that nobody waits for. ``clock``: that of the turns."""
    pause_s = min(limit_s / 4, UNREAD_SECONDS)
    looked_s = awake_since_s = clock()
    while True:
        await asyncio.sleep(pause_s)
        if clock() - looked_s > MISSED_PAUSES * pause_s:
            awake_since_s = clock()
        looked_s = clock()
        turns.end_unread(limit_s, awake_since_s)


def add_health(server: grpc.aio.Server, reflects: bool) -> health.aio.HealthServicer:
    """``reflects``: anybody is told what can be called."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if reflects:
        names = (CHAT_SERVICE, FLEET_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return servicer


def listen(server: grpc.aio.Server, address: str, tls: TlsFolder | None = None) -> str:
    """Bind; returns host:port with the real port. Raises CannotListen."""
    if (reason := why_not_listen(address)) is not None:
        raise CannotListen(f"cannot listen on {address}: {reason}")
    host, _ = parse_address(address, to_listen=True)
    try:
        bound = bind(server, address, tls)
    except RuntimeError as e:
        raise CannotListen(f"cannot listen on {address}: {e}; give another address with --listen") from e
    return f"{host}:{bound}"


def wall_ms() -> int:
    """For records only; nothing is decided by it."""
    return time.time_ns() // 1_000_000


def stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM, SIGINT or SIGHUP; a second one that means so ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set() and means_at_once(number):
            os._exit(1)
        stop.set()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop
