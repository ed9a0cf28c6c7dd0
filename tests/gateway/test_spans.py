"""What a span of a request tells: an application of one route under the middleware, and a span that is looked at."""

from __future__ import annotations

from unittest.mock import Mock

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.gateway.tracing import Traced
from kvferry.telemetry import tracing


@pytest.fixture
def span(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """That of the next request."""
    span = Mock(spec=tracing.Span)
    monkeypatch.setattr(tracing, "is_on", lambda: True)
    monkeypatch.setattr(tracing, "begin", lambda *_: span)
    return span


async def test_a_bug_fails_the_span_of_its_request(span):
    async def buggy(request: Request) -> Response:
        raise AssertionError(request.url.path)

    routes = [Route("/v1/buggy", buggy)]
    app = Starlette(routes=routes, middleware=[Middleware(Traced, routes=routes)])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/v1/buggy")).status_code == 500
    span.fail.assert_called_once_with("500")
    span.rename.assert_called_once_with("GET /v1/buggy")
    span.end.assert_called_once_with()
