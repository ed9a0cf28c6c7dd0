"""The API token of an HTTP request: handed on to the coordinator with every call that is made for it."""

from __future__ import annotations

import contextlib
import contextvars
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.trust.bearer import AUTHORIZATION, BEARER, Secret, checked
from kvferry.trust.errors import TokensInvalid

_given: Final[contextvars.ContextVar[Secret | None]] = contextvars.ContextVar("kvferry_bearer", default=None)


def given_token() -> Secret | None:
    """Of the request that is being answered, also in tasks that were begun for it; None: none that could be one."""
    return _given.get()


class TokensHandedOn:
    """Notes each request's token. Whether it is right is the coordinator's business: it alone knows."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _given.set(_token_of(scope))
        await self._app(scope, receive, send)


def _token_of(scope: Scope) -> Secret | None:
    headers = (value.decode("latin-1") for name, value in scope["headers"] if name.decode("latin-1") == AUTHORIZATION)
    for header in headers:
        if header[: len(BEARER)].lower() == BEARER.lower():
            with contextlib.suppress(TokensInvalid):  # any key will do where none is needed
                return checked(header[len(BEARER) :], "the request")
    return None
