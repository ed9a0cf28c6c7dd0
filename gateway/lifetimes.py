"""How long a request's answer lives: what nobody can ask for any more is neither computed nor kept.

Who was told an id may come back with it: whatever happens to his connection, his answer goes on. Before that, nobody
has a name for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from kvferry.client import ClientError, Conflict, NotFound
from kvferry.gateway import sse
from kvferry.gateway.context import Context
from kvferry.gateway.errors import ApiError

PAUSE_SECONDS: Final = 0.2
"""For a turn that is to be ended and is just beginning."""

MAX_TRIES: Final = 100

Ending = Callable[[], Coroutine[None, None, object]]


async def answered(
    request: Request,
    context: Context,
    work: Coroutine[None, None, Response],
    *,
    if_refused: Ending,
    if_left: Ending,
) -> Response:
    """What `work` makes: an answer, or a stream of which nothing was told yet.

    `if_refused` is done when it raises, `if_left` when the client hangs up before. Raises what it raises, and ApiError
    for those who have left.
    """
    working = asyncio.create_task(_or_forgotten(context, work, if_refused))
    leaving = asyncio.create_task(sse.left(request.receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        working.cancel()
        raise
    finally:
        leaving.cancel()
    if working.done():
        return working.result()
    context.in_background(_ended(working, if_left))
    raise ApiError(499, "the client hung up before it had an answer", code="client_left")


async def _or_forgotten(context: Context, work: Coroutine[None, None, Response], if_refused: Ending) -> Response:
    try:
        return await work
    except (ApiError, ClientError):
        context.in_background(_done(if_refused, lambda: True))
        raise


async def _ended(working: asyncio.Task[Response], end: Ending) -> None:
    await _done(end, working.done)
    with contextlib.suppress(ApiError, ClientError):
        answer = await working
        if isinstance(answer, sse.EventStream):
            await answer.aclose()


async def _done(end: Ending, is_settled: Callable[[], bool]) -> None:
    """Also to what is just beginning: the coordinator does not know of it yet (unless all `is_settled`), or is busy
    with it. Raises ClientError."""
    for _ in range(MAX_TRIES):
        was_settled = is_settled()
        try:
            await end()
        except NotFound:
            if was_settled:
                return
        except Conflict:
            pass
        else:
            return
        await asyncio.sleep(PAUSE_SECONDS)
