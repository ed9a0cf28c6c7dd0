"""Who may look at the dashboard: it shows the whole cluster by the gateway's own credentials, so at first only this
machine.

A page of another site must not reach it either, neither by a form (its origin is told by Sec-Fetch-Site) nor by a name
that resolves to 127.0.0.1 (the Host header has to be this machine's).
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.context import context_of
from kvferry.gateway.dashboard.audience import Audience
from kvferry.gateway.errors import ApiError

Endpoint = Callable[[Request], Awaitable[Response]]


def guarded(endpoint: Endpoint) -> Endpoint:
    """The endpoint, for those who may look."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        audience = context_of(request).dashboard.audience
        if audience is Audience.OFF:
            raise ApiError(404, f"there is no {request.method} {request.url.path} here", code="unknown_url")
        if audience is Audience.LOOPBACK and not is_from_here(request):
            raise ApiError(
                403, "the dashboard is shown on the gateway's own machine only: tunnel to it, or start the gateway "
                "with --dashboard all", code="not_allowed",
            )  # fmt: skip
        if request.method == "POST" and request.headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
            raise ApiError(403, "another site may not use the dashboard", code="not_allowed")
        return await endpoint(request)

    return answer


def is_from_here(request: Request) -> bool:
    """Whether somebody on this machine asks, by a name of this machine, and for nobody else."""
    if any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip")):
        return False
    return request.client is not None and is_loopback(request.client.host) and is_loopback(request.url.hostname or "")


def is_loopback(host: str) -> bool:
    """Of a name or an address."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
