"""The gateway's whole life: take the port, serve, stop in order."""

from __future__ import annotations

import logging
import secrets
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvicorn

from kvferry.client import AsyncClient
from kvferry.gateway.app import create_app
from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.context import Context
from kvferry.gateway.dashboard.watcher import Watcher
from kvferry.gateway.errors import CannotListen, ConfigInvalid
from kvferry.gateway.models import Models
from kvferry.proto.address import parse_address, why_not_listen
from kvferry.proto.ready_file import write_ready_file
from kvferry.telemetry.service_manager import ServiceManager
from kvferry.telemetry.watchdog import Watchdog, loop_check

log = logging.getLogger(__name__)

BACKLOG: Final = 1024

STOP_SECONDS: Final = 2
"""For streams that are open at the end: their turns go on, and their readers reconnect to another gateway."""

KEEP_ALIVE_SECONDS: Final = 75
"""Longer than common clients and proxies keep an idle connection: they close it, not we."""


def serve(config: GatewayConfig) -> None:
    """Until SIGTERM or Ctrl-C. Raises CannotListen."""
    listening = listen(config.listen)
    address = f"{config.listen.rpartition(':')[0]}:{listening.getsockname()[1]}"

    def make_context() -> Context:
        client = AsyncClient(config.coordinator, patience_s=config.patience_seconds)
        return Context(
            client=client,
            models=Models(client, time.monotonic),
            watcher=Watcher(client, lambda: time.time() * 1000),
            may_kill=config.allow_kill,
            keep_seconds=config.keep_seconds,
            keep_responses_seconds=max(1, round(config.keep_responses_days * 86_400)),
            new_id=lambda: uuid.uuid4().hex,
            new_seed=lambda: secrets.randbits(63),
            wall_clock=time.time,
        )

    def on_ready() -> None:
        log.info("the OpenAI API is at http://%s/v1", address)
        if config.ready_file is not None:
            tell_ready(config.ready_file, address)
        manager.ready(status)

    manager, status = ServiceManager(), f"serves at http://{address}"
    server = Server(
        uvicorn.Config(
            create_app(make_context),
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        ),
        on_ready,
    )
    with Watchdog(manager, [loop_check(lambda: server.beat_at)], lambda: status):
        server.run(sockets=[listening])


class Server(uvicorn.Server):
    """uvicorn, which says when it serves, and when it last came around."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self.beat_at = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        self.beat_at = time.monotonic()  # ten times a second
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def tell_ready(path: Path, address: str) -> None:
    """Raises ConfigInvalid: whoever waits for the file would wait for ever."""
    try:
        write_ready_file(path, address)
    except OSError as error:
        raise ConfigInvalid(f"the ready file {path} cannot be written: {error.strerror}") from error


def listen(address: str) -> socket.socket:
    """A bound socket. Raises CannotListen."""
    if (reason := why_not_listen(address)) is not None:
        raise CannotListen(f"cannot listen at {address}: {reason}")
    host, port = parse_address(address, to_listen=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise CannotListen(
            f"cannot listen at {address}: {(error.strerror or str(error)).lower()}; give another --listen"
        ) from error
    return bound
