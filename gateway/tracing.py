"""One span for each request to the API, with the caller's trace as its parent if it sent a traceparent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.telemetry import tracing


class Traced:
    """The middleware. Names are of routes, never of paths: those hold ids, and whatever a client wrote."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._paths: dict[Any, str] = {route.endpoint: route.path for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the application."""
        if not tracing.is_on() or scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        tracing.follow((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        span = tracing.begin(scope["method"], "server", {"http.request.method": scope["method"]})
        span.enter()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set({"http.response.status_code": message["status"]})
                if message["status"] >= 500:
                    span.fail(str(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            span.fail("500")  # a bug, of which Starlette tells the client behind our back
            raise
        finally:
            route = self._paths.get(scope.get("endpoint"))
            if route is not None:
                span.rename(f"{scope['method']} {route}")
                span.set({"http.route": route})
            span.end()
