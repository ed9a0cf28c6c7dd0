"""A node's whole life: listen, load, join, serve until told to stop, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.engine.cores import CoreChoice, pin_this_thread
from kvferry.node.config import NodeConfig
from kvferry.node.errors import ConfigInvalid, Draining, PortInUse
from kvferry.node.liveness import describe, engine_check
from kvferry.node.loading import load_serving
from kvferry.node.membership import Memberships
from kvferry.node.messages import Drain, DrainCount, Reply, Shutdown
from kvferry.node.metrics import NodeMetrics
from kvferry.node.service import WorkerService
from kvferry.node.state import NodeState, Serving
from kvferry.proto.address import why_not_listen
from kvferry.proto.channel import server_options
from kvferry.proto.malformed import MalformedRefused
from kvferry.proto.ready_file import why_not_written, write_ready_file
from kvferry.proto.v1 import worker_pb2, worker_pb2_grpc
from kvferry.telemetry.exposition import Exposition
from kvferry.telemetry.host import HostMetrics
from kvferry.telemetry.service_manager import ServiceManager
from kvferry.telemetry.watchdog import Watchdog, loop_check
from kvferry.terminal.interrupts import means_at_once, stop_signals
from kvferry.trust.certificates import Role
from kvferry.trust.doors import bind, check_plaintext, has_reflection, open_folder
from kvferry.trust.guard import Guard
from kvferry.trust.interceptor import Guarded

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVICE: Final = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

MAX_CALLS: Final = 2048
"""Calls at once, turns included: those beyond are answered RESOURCE_EXHAUSTED by gRPC itself."""

GRACE_SECONDS: Final = 1.0
"""For calls that are being answered when the server stops: their last message is on its way already."""

START_STEP_SECONDS: Final = 300.0
"""One step of the start may take so long: kernels take minutes to compile on a board, weights to be packed as well."""

THREAD_END_SECONDS: Final = 2.0
"""For the engine's current step and the store's current call; whoever takes longer is left behind (both are
daemons)."""

END_SECONDS: Final = 2 * GRACE_SECONDS + 3 * THREAD_END_SECONDS + 5.0
"""What may pass after a drain, at most, with room."""


class Node:
    """Runs in one event loop; `serve` is its whole life."""

    def __init__(self, config: NodeConfig, cores: CoreChoice) -> None:
        """``cores``: what the process has; only loading and the engine leave those that the caller keeps to.

        Raises TlsFolderInvalid, PlaintextRefused.
        """
        self._config = config
        check_plaintext(config.listen, has_tls=config.tls_dir is not None, is_allowed=config.insecure_plaintext)
        self._tls = open_folder(config.tls_dir, Role.NODE, config.node_id, config.reached_at)
        self._state = NodeState(config=config, started_at=time.monotonic())
        self._server = grpc.aio.server(
            interceptors=[Guarded(Guard(self._tls)), MalformedRefused()],
            options=server_options(),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._health = health.aio.HealthServicer()
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._engine_failed = False
        self._memberships: Memberships | None = None
        self._membership_task: asyncio.Task[None] | None = None
        self._lag_task: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[DrainCount] | None = None
        self._exposition = Exposition(config.metrics, NodeMetrics(self._state), HostMetrics("node", config.tls_dir))
        self._cores = cores
        self._manager = ServiceManager()
        self._watchdog: Watchdog | None = None

    async def serve(self) -> int:
        """Serve until a signal; returns the exit code. Raises what stands in the way of starting."""
        self._catch_signals()
        address = await self._listen()
        try:
            serving = await self._until_stopped(_in_daemon_thread(self._loader()))
            if serving is not None:
                await self._open_for_work(serving, address)
                await self._stop.wait()
                if not self._engine_failed:
                    await self._drain_in_time(self._config.drain_timeout_seconds)
        finally:
            await self._close()
        return self._exit_code

    async def drain(self, timeout_seconds: float, finish_seconds: float = 0.0) -> DrainCount:
        """Refuse new turns, end the running ones, save what is resident, leave the fleet. Again: the same answer.

        Running turns have `finish_seconds` to finish by themselves, or until the process is told to end.
        """
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_once(timeout_seconds, finish_seconds))
        return await asyncio.shield(self._drain)

    async def _drain_in_time(self, timeout_seconds: float) -> None:
        """A drain that somebody asked for with a longer timeout does not hold up the end of the process."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.drain(timeout_seconds), timeout_seconds + GRACE_SECONDS)

    async def _drain_once(self, timeout_seconds: float, finish_seconds: float) -> DrainCount:
        engine = self._state.ready().engine
        self._state.fence.draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._memberships is not None:
            self._memberships.beat_now()
        await self._let_turns_finish(finish_seconds)
        reply: Reply[DrainCount] = Reply()
        n_turns = self._state.n_turns
        engine.send(Drain(Draining("this node is being drained; the turn goes on elsewhere"), reply))
        try:
            count = await asyncio.wait_for(reply.wait(), timeout_seconds)
        except TimeoutError:
            count = DrainCount(engine.view.n_saved, n_turns)
            log.warning("the drain ends after %.0f s with sessions that could not be saved", timeout_seconds)
        await self._leave()
        log.info("drained: %d sessions saved, %d turns moved", count.n_sessions_saved, count.n_turns_moved)
        return count

    async def _let_turns_finish(self, seconds: float) -> None:
        if seconds > 0:
            waits = [asyncio.create_task(event.wait()) for event in (self._state.idle, self._stop)]
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _listen(self) -> str:
        """Take the port first: a wrong address must not cost loading a model."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(self._state, self), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if has_reflection(self._config.reflection, self._config.listen, self._tls):
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if (reason := why_not_listen(self._config.listen)) is not None:
            raise PortInUse(f"cannot listen at {self._config.listen}: {reason}")
        try:
            port = bind(self._server, self._config.listen, self._tls)
        except RuntimeError as error:
            raise PortInUse(f"cannot listen at {self._config.listen}: {error}; give another --listen") from error
        await self._server.start()
        self._exposition.start()
        host = self._config.listen.rpartition(":")[0]
        self._address = f"{host}:{port}"
        return self._config.advertised(port)

    def _loader(self) -> Callable[[], Serving]:
        loop = asyncio.get_running_loop()
        boot_id = uuid.uuid4().hex
        package_version = version("kvferry")
        note = self._state.store_watch.note

        def begins(step: str) -> None:
            self._manager.starting(step, START_STEP_SECONDS)

        def load() -> Serving:
            pin_this_thread(self._cores.allowed)  # packing and compiling take what there is: nothing is served yet
            return load_serving(self._config, loop, boot_id, package_version, self._on_engine_failure, note, begins)

        return load

    async def _open_for_work(self, serving: Serving, address: str) -> None:
        self._state.serving = serving
        serving.engine.start()
        self._lag_task = asyncio.create_task(self._state.loop_lag.run())
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        if self._config.coordinators:
            self._memberships = Memberships(self._state, address, self._tls)
            self._membership_task = asyncio.create_task(self._memberships.run())
            self._membership_task.add_done_callback(self._on_membership_end)
        if self._config.ready_file is not None:
            where = {"metrics": self._exposition.address} if self._exposition.address else {}
            _tell_ready(self._config.ready_file, self._address, node_id=self._config.node_id, **where)
        self._watch(serving)
        log.info("node %s serves at %s (%s)", self._config.node_id, self._address, serving.identity.kernel_path)

    def _watch(self, serving: Serving) -> None:
        """Say that the node is ready, and that it gets on for as long as it does."""
        loop = asyncio.get_running_loop()

        def tell(trouble: str) -> None:
            loop.call_soon_threadsafe(self._on_trouble, trouble)

        checks = [engine_check(serving.engine), loop_check(lambda: self._state.loop_lag.beat_at)]
        self._watchdog = Watchdog(self._manager, checks, lambda: describe(self._state), tell)
        self._manager.ready(describe(self._state))
        self._watchdog.start()

    def _on_trouble(self, trouble: str) -> None:
        """Be as ready as the node is."""
        self._state.hangs = trouble
        if not self._state.fence.draining:
            status = health_pb2.HealthCheckResponse
            self._health_task = asyncio.create_task(self._set_health(status.NOT_SERVING if trouble else status.SERVING))

    async def _until_stopped(self, task: asyncio.Future[T]) -> T | None:
        """The task's result, or None when the process is told to stop before."""
        stopped = asyncio.create_task(self._stop.wait())
        either: set[asyncio.Future[Any]] = {task, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return task.result() if task.done() else None

    async def _leave(self) -> None:
        if self._membership_task is not None and self._memberships is not None:
            self._membership_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._membership_task
            await self._memberships.leave()

    async def _close(self) -> None:
        """End the server and the threads; a thread that hangs is left behind, and the process ends without it."""
        serving = self._state.serving
        for task in (self._membership_task, self._lag_task):
            if task is not None:
                task.cancel()
        if self._watchdog is not None:
            await asyncio.to_thread(self._watchdog.stop)
        if serving is not None:
            serving.engine.send(Shutdown(Draining("this node ends; the turn goes on elsewhere")))
        await asyncio.to_thread(self._exposition.stop)
        await self._server.stop(GRACE_SECONDS)
        ended = serving is None or await asyncio.to_thread(_end_threads, serving)
        if self._stop.is_set() and (serving is None or not ended):
            logging.shutdown()
            os._exit(self._exit_code)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():  # the second one
            if means_at_once(number):
                os._exit(128 + number)
            return
        log.info("%s: the node drains and ends", number.name)
        self._manager.stopping("drains, and ends", self._config.drain_timeout_seconds + END_SECONDS)
        self._stop.set()

    def _on_engine_failure(self) -> None:
        self._engine_failed = True
        self._fail()

    def _fail(self) -> None:
        self._exit_code = 1
        self._stop.set()

    def _on_membership_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("a bug ended the membership; the node drains and ends", exc_info=task.exception())
            self._fail()


def _end_threads(serving: Serving) -> bool:
    """False when a thread hangs."""
    if not serving.engine.close(THREAD_END_SECONDS):
        return False
    if serving.vision is not None and not serving.vision.close(THREAD_END_SECONDS):
        return False
    serving.rules.close()
    serving.close_engine()
    return serving.io is None or serving.io.close(THREAD_END_SECONDS)


def _in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Like asyncio.to_thread, but the process may end while it runs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(cast("T", result))
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed on, not swallowed
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    threading.Thread(target=run, name="kvferry-load", daemon=True).start()
    return future


def _tell_ready(path: Path, address: str, **identity: str) -> None:
    """Raises ConfigInvalid: whoever waits for the file would wait for ever."""
    try:
        write_ready_file(path, address, **identity)
    except OSError as error:
        raise ConfigInvalid(why_not_written(path, error)) from error
