"""One HTTP port that answers a Prometheus scrape, in a thread of its own: a scrape never waits for an event loop."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from kvferry.proto.address import parse_address, why_not_listen


class CannotExpose(Exception):
    """The address for metrics is taken, or none of this machine's."""

    code: ClassVar[str] = "cannot_listen"
    exit_code: ClassVar[int] = 1


class Exposition:
    """Serves what `collectors` collect, from `start` to `stop`. `address`: HOST:PORT; None: nothing is served."""

    def __init__(self, address: str | None, *collectors: Collector) -> None:
        self._address = address
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            self._registry.register(collector)
        self._stop: Callable[[], None] | None = None
        self.address = ""  # HOST:PORT with the real port, once it serves

    def start(self) -> Self:
        """Raises CannotExpose."""
        if self._address is None:
            return self
        if (reason := why_not_listen(self._address)) is not None:
            raise CannotExpose(f"metrics cannot be served at {self._address}: {reason}")
        host, port = parse_address(self._address, to_listen=True)
        server, thread = start_http_server(port, host.strip("[]"), self._registry)
        self.address = f"{host}:{server.server_port}"

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stop = stop
        return self

    def stop(self) -> None:
        """Again: no effect."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
