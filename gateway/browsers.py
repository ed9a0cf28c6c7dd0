"""What browsers tell of their requests: a page of any site may have its readers' browsers send some here.

They say which site asks in Sec-Fetch-Site, or, where this is plaintext on a network, in Origin alone. A name that a
page's owner had resolve to this machine makes the page one of our site: the Host header tells.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.bearer import given_token
from kvferry.gateway.errors import ApiError

Endpoint = Callable[[Request], Awaitable[Response]]

READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""A page cannot see what another site answers, so these do it no good; what is asked by a link has to work."""

OWN: Final = frozenset({"same-origin", "none"})

FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip")


def from_own_site(endpoint: Endpoint) -> Endpoint:
    """The endpoint, for programs, and for pages that this gateway's owner put beside it.

    Pages of other sites may not ask, but with an API token: a browser sends none for them unless it was allowed to,
    which the gateway never does.
    """

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        if given_token() is None:
            check_site(request)
        if _is_of_page(request) and is_loopback(_client(request)) and not is_forwarded(request):
            check_name(request)
        return await endpoint(request)

    return answer


def check_site(request: Request) -> None:
    """Raises ApiError for what a page of another site wants done."""
    if request.method in READING:
        return
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        is_own = site in OWN
    else:
        is_own = origin is None or origin.partition("://")[2] == request.headers.get("host")
    if not is_own:
        raise ApiError(403, "a page of another site may not use this gateway", code="not_allowed")


def check_name(request: Request) -> None:
    """Raises ApiError for a page that asks this machine by a name that is none of its own."""
    if not is_loopback(_asked_name(request)):
        raise ApiError(
            403, "a page asks for a name that is none of this machine's: have it ask for 127.0.0.1, or the proxy in "
            "between send X-Forwarded-For", code="not_allowed",
        )  # fmt: skip


def is_from_here(request: Request) -> bool:
    """Whether somebody on this machine asks, by a name of this machine, and for nobody else."""
    return not is_forwarded(request) and is_loopback(_client(request)) and is_loopback(_asked_name(request))


def is_forwarded(request: Request) -> bool:
    """By a proxy that says so."""
    return any(name in request.headers for name in FORWARDED)


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


def _is_of_page(request: Request) -> bool:
    """A browser's, other than by a link or an address that its user typed."""
    return "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none"


def _asked_name(request: Request) -> str:
    return request.url.hostname or ""


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host
