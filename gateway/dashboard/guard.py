"""Who may look at the dashboard: it shows the whole cluster by the gateway's own credentials, so at first only this
machine.

A page of another site must not reach it either, neither by a form nor by a name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import functools

from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.browsers import Endpoint, check_site, is_from_here
from kvferry.gateway.context import context_of
from kvferry.gateway.dashboard.audience import Audience
from kvferry.gateway.errors import ApiError


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
        check_site(request)
        return await endpoint(request)

    return answer
