"""The gateway's whole life: take the port, serve, stop in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvicorn

from kvferry.client import AsyncClient
from kvferry.gateway.app import create_app
from kvferry.gateway.bearer import given_token
from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.context import Context
from kvferry.gateway.dashboard.history import History
from kvferry.gateway.dashboard.state import Dashboard
from kvferry.gateway.dashboard.watcher import Watchers
from kvferry.gateway.dashboard.whereabouts import Whereabouts
from kvferry.gateway.errors import CannotListen, ConfigInvalid
from kvferry.gateway.https import CertificateFiles
from kvferry.gateway.models import Models
from kvferry.gateway.protocol import HttpProtocol
from kvferry.proto.address import parse_address, why_not_listen
from kvferry.proto.ready_file import why_not_written, write_ready_file
from kvferry.telemetry.pauses import keep_loaded
from kvferry.telemetry.service_manager import ServiceManager
from kvferry.telemetry.watchdog import Watchdog, loop_check
from kvferry.terminal.interrupts import stop_signals
from kvferry.trust.certificates import Role
from kvferry.trust.doors import check_plaintext, open_folder

log = logging.getLogger(__name__)

BACKLOG: Final = 1024

STOP_SECONDS: Final = 2
"""For streams that are open at the end: their turns go on, and their readers reconnect to another gateway."""

KEEP_ALIVE_SECONDS: Final = 75
"""Longer than common clients and proxies keep an idle connection: they close it, not we."""


def serve(config: GatewayConfig) -> None:
    """Until SIGTERM, Ctrl-C or a closed terminal.

    Raises CannotListen, ConfigInvalid, PlaintextRefused, TlsFolderInvalid.
    """
    https = config.https_files
    check_plaintext(
        config.listen, has_tls=https is not None, is_allowed=config.insecure_plaintext,
        remedy="give --https with --tls-dir, or --https-cert and --https-key",
    )  # fmt: skip
    if https is not None:
        https.check()
    open_folder(config.tls_dir, Role.GATEWAY)
    if not config.hands_tokens_on:
        log.warning("callers' API tokens stay here: the way to %s is in clear", config.coordinator)
    listening = listen(config.listen)
    address = f"{config.listen.rpartition(':')[0]}:{listening.getsockname()[1]}"

    def make_context() -> Context:
        client = AsyncClient(
            config.coordinator, patience_s=config.patience_seconds, tls_dir=config.tls_dir,
            token=given_token if config.hands_tokens_on else None, insecure_plaintext=config.insecure_plaintext,
        )  # fmt: skip
        return Context(
            client=client,
            models=Models(client, time.monotonic),
            dashboard=make_dashboard(config, client, lambda: time.time() * 1000),
            keep_seconds=config.keep_seconds,
            keep_responses_seconds=max(1, round(config.keep_responses_days * 86_400)),
            new_id=lambda: uuid.uuid4().hex,
            new_seed=lambda: secrets.randbits(63),
            wall_clock=time.time,
        )

    def on_ready() -> None:
        log.info("the OpenAI API is at %s/v1", url)
        if config.ready_file is not None:
            tell_ready(config.ready_file, address)
        manager.ready(status)

    url = f"{'http' if https is None else 'https'}://{address}"
    manager, status = ServiceManager(), f"serves at {url}"
    server = Server(
        uvicorn.Config(
            create_app(make_context, config.tls_dir),
            http=HttpProtocol,
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
            ssl_certfile=None if https is None else https.certificate,
            ssl_keyfile=None if https is None else https.key,
        ),
        on_ready,
        https,
    )
    keep_loaded()
    if signal.SIGHUP in stop_signals():  # uvicorn sees to the others
        signal.signal(signal.SIGHUP, lambda *_: server.end())
    with Watchdog(manager, [loop_check(lambda: server.beat_at)], lambda: status):
        server.run(sockets=[listening])


def make_dashboard(config: GatewayConfig, client: AsyncClient, now_ms: Callable[[], float]) -> Dashboard:
    """``now_ms``: since 1970."""
    return Dashboard(
        watchers=Watchers(client, now_ms),
        history=History(now_ms),
        whereabouts=Whereabouts(client, now_ms),
        audience=config.dashboard,
        may_kill=config.allow_kill,
        drill_reports=config.drill_reports,
    )


class Server(uvicorn.Server):
    """uvicorn, which says when it serves, and when it last came around."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], https: CertificateFiles | None = None
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._https = https
        self._following: asyncio.Task[None] | None = None
        self.beat_at = time.monotonic()

    def end(self) -> None:
        """As a first SIGTERM does."""
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        self.beat_at = time.monotonic()  # ten times a second
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._https is not None and self.config.ssl is not None:
            self._following = asyncio.create_task(self._https.follow(self.config.ssl), name="certificates")
        if self.started:
            try:
                self._on_ready()
            except ConfigInvalid:
                await self.shutdown(sockets)
                raise


def tell_ready(path: Path, address: str) -> None:
    """Raises ConfigInvalid: whoever waits for the file would wait for ever."""
    try:
        write_ready_file(path, address)
    except OSError as error:
        raise ConfigInvalid(why_not_written(path, error)) from error


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
