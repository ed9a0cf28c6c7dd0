"""What the gateway tells a monitor: its requests and its streams. Names are stable: docs/metrics.md lists them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.telemetry.families import PREFIX
from kvferry.telemetry.host import HostMetrics
from kvferry.telemetry.loop_lag import LoopLag

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150)

ELSEWHERE: Final = "other"
"""The route of whatever no route matched: paths are chosen by clients, and may say anything."""

NO_STATUS: Final = "none"
"""The client went away before it."""

STREAM: Final = b"text/event-stream"

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class GatewayMetrics(Collector):
    """Counts by route, never by path: a path holds ids. Event loop only; `collect` is called there as well."""

    def __init__(self, tls_dir: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._loop_lag = LoopLag(clock)
        own = self._registry = CollectorRegistry()
        self.requests = Counter(
            f"{PREFIX}_gateway_requests", "Requests by how they were answered.", ["route", "method", "status"],
            registry=own,
        )  # fmt: skip
        self.first_byte = Histogram(
            f"{PREFIX}_gateway_first_byte_seconds", "From a request to the first byte of its answer.", ["route"],
            buckets=SECONDS, registry=own,
        )  # fmt: skip
        self.whole = Histogram(
            f"{PREFIX}_gateway_request_seconds", "From a request to the last byte of its answer.", ["route"],
            buckets=SECONDS, registry=own,
        )  # fmt: skip
        self.n_bytes = Counter(
            f"{PREFIX}_gateway_response_bytes", "Bytes of answers, without headers.", ["route"], registry=own
        )
        self.streams = Gauge(f"{PREFIX}_gateway_streams_open", "Answers that are being streamed.", registry=own)
        self._exposed = CollectorRegistry(auto_describe=False)
        for collector in (self, HostMetrics("gateway", tls_dir)):
            self._exposed.register(collector)

    def collect(self) -> Iterator[Metric]:
        """Of the requests since the start."""
        yield from self._registry.collect()
        yield self._loop_lag.metric()

    async def answer(self, request: Request) -> Response:
        """GET /metrics."""
        del request
        return Response(generate_latest(self._exposed), media_type=CONTENT_TYPE_LATEST)

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[None]:
        """While the application lives: how late its loop wakes."""
        task = asyncio.create_task(self._loop_lag.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class Counted:
    """The middleware: one look at each message of an answer, on its way out."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths: dict[Any, str] = {route.endpoint: route.path for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(self._metrics, send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            answer.failed()
            raise
        finally:
            answer.ended(self._paths.get(scope.get("endpoint"), ELSEWHERE), scope["method"])


class _Answer:
    """One answer on its way."""

    def __init__(self, metrics: GatewayMetrics, send: Send) -> None:
        self._metrics = metrics
        self._send = send
        self._began_at = metrics.clock()
        self._first_byte_seconds: float | None = None
        self._status = NO_STATUS
        self._n_bytes = 0
        self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = str(message["status"])
            headers: Iterable[tuple[bytes, Any]] = message.get("headers", ())
            self._is_stream = any(k == b"content-type" and v.startswith(STREAM) for k, v in headers)
            if self._is_stream:
                self._metrics.streams.inc()
        elif message["type"] == "http.response.body":
            self._n_bytes += len(message.get("body", b""))
            if self._n_bytes and self._first_byte_seconds is None:
                self._first_byte_seconds = self._metrics.clock() - self._began_at
        await self._send(message)

    def failed(self) -> None:
        """A bug, of which Starlette tells the client behind our back."""
        if self._status == NO_STATUS:
            self._status = "500"

    def ended(self, route: str, method: str) -> None:
        metrics = self._metrics
        if self._is_stream:
            metrics.streams.dec()
        metrics.requests.labels(route, method if method in METHODS else ELSEWHERE, self._status).inc()
        metrics.n_bytes.labels(route).inc(self._n_bytes)
        metrics.whole.labels(route).observe(metrics.clock() - self._began_at)
        if self._first_byte_seconds is not None:
            metrics.first_byte.labels(route).observe(self._first_byte_seconds)
