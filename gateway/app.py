"""The application: which path is answered by what, and how errors look."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from kvferry.client import ClientError
from kvferry.gateway.bearer import TokensHandedOn
from kvferry.gateway.body import FIELDS_AT_FAULT
from kvferry.gateway.browsers import from_own_site
from kvferry.gateway.chat import chat_completions
from kvferry.gateway.completions import completions
from kvferry.gateway.context import Context, context_of
from kvferry.gateway.dashboard import api as dashboard
from kvferry.gateway.errors import NO_FIELDS, ApiError, api_error_of
from kvferry.gateway.metrics import Counted, GatewayMetrics
from kvferry.gateway.responses import cancel_response, create_response, delete_response, get_response
from kvferry.gateway.tracing import Traced

log = logging.getLogger(__name__)

ROUTES: Final = [
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", create_response),
    ("GET", "/v1/responses/{response_id}", get_response),
    ("POST", "/v1/responses/{response_id}/cancel", cancel_response),
    ("DELETE", "/v1/responses/{response_id}", delete_response),
]

HEALTH_SECONDS: Final = 2.0
"""For the coordinators to answer in."""


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    names = await context_of(request).models.asked()
    return JSONResponse({"object": "list", "data": [_model(name) for name in names]})


async def get_model(request: Request) -> Response:
    """GET /v1/models/ID."""
    return JSONResponse(_model(await context_of(request).models.retrieve(request.path_params["model"])))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvferry"}


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings: refused."""
    del request
    raise ApiError(
        400, "the models of this cluster answer in words, they have no embeddings", code="unsupported_endpoint"
    )


async def health(request: Request) -> Response:
    """GET /health: 200 while turns can be taken, else 503 that says why not. Soon: a probe takes silence for death."""
    status = await context_of(request).client.status(within_s=HEALTH_SECONDS)
    n_live = sum(node.state == "live" for node in status.nodes)
    body = {"status": "ok" if n_live else "no_node", "model": status.model, "nodes_live": n_live}
    return JSONResponse(body, 200 if n_live else 503)


def create_app(make_context: Callable[[], Context], tls_dir: Path | None = None) -> Starlette:
    """`make_context` is called in the event loop that serves."""

    metrics = GatewayMetrics(tls_dir)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        context = make_context()
        async with context.client, metrics.measuring():
            app.state.context = context
            yield
            context.stop()

    routes = [Route(path, from_own_site(endpoint), methods=[method]) for method, path, endpoint in ROUTES]
    routes += [
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", get_model),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics.answer),
    ]
    routes += dashboard.ROUTES
    handlers: Mapping[type[Exception], Callable[[Request, Exception], Response]] = {
        ApiError: _on_api_error,
        ClientError: _on_client_error,
        HTTPException: _on_http_error,
        Exception: _on_bug,
    }
    around = [
        Middleware(Counted, metrics=metrics, routes=routes),
        Middleware(Traced, routes=routes),
        Middleware(TokensHandedOn),
    ]
    return Starlette(routes=routes, middleware=around, exception_handlers=dict(handlers), lifespan=lifespan)


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers())


def _on_api_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)  # noqa: S101 - Starlette's signature is wider than what it hands over
    return _answer(error)


def _on_client_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ClientError)  # noqa: S101 - as above
    return _answer(api_error_of(error, getattr(request.state, FIELDS_AT_FAULT, NO_FIELDS)))


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - as above
    what = f"{request.method} {request.url.path}"
    sentence = {404: f"there is no {what} here", 405: f"{what} is not a method of this path"}
    code = {404: "unknown_url", 405: "method_not_allowed"}
    status = error.status_code
    allow = ", ".join(sorted(_methods_of(request))) if status == 405 else ""
    return _answer(
        ApiError(status, sentence.get(status, str(error.detail)), code=code.get(status, "http_error"), allow=allow)
    )


def _methods_of(request: Request) -> set[str]:
    """Of the request's path; several routes may have it, each with methods of its own."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return {
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


def _on_bug(request: Request, error: Exception) -> Response:
    del request, error  # Starlette logs it, with the traceback and without the request's body
    return _answer(ApiError(500, "the gateway met a bug, its log says which", code="internal"))
