"""The guard in front of an asyncio gRPC server's methods."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from kvferry.proto.handlers import put_around
from kvferry.proto.status import status_of, trailing_metadata
from kvferry.trust.caller import Caller, answer_to
from kvferry.trust.errors import Refused
from kvferry.trust.guard import Guard

Context = grpc.aio.ServicerContext[Any, Any]


class Guarded(grpc.aio.ServerInterceptor):
    """Refuses a call before its handler runs, and ends a stream whose caller was revoked meanwhile.

    The first interceptor of a server: what the others say about a request is not for everybody.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's handler, behind the guard."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or self._guard.lets_all_in:
            return handler  # type: ignore[no-any-return]
        method = str(handler_call_details.method)
        return put_around(handler, lambda behaviour: self._guarded(behaviour, method))

    def _guarded(self, behaviour: Callable[[Any, Context], Any], method: str) -> Callable[[Any, Context], Any]:
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                caller = await self._admit(method, request, context)
                async for message in behaviour(request, context):
                    await self._check_still(caller, context)
                    yield message

            return stream

        async def call(request: Any, context: Context) -> Any:
            await self._admit(method, request, context)
            return await behaviour(request, context)

        return call

    async def _admit(self, method: str, request: Any, context: Context) -> Caller:
        try:
            caller = self._guard.admit(method, request, context)
        except Refused as refused:
            await refuse(refused, context)
        answer_to(caller)
        return caller

    async def _check_still(self, caller: Caller, context: Context) -> None:
        try:
            self._guard.check_still(caller)
        except Refused as refused:
            await refuse(refused, context)


async def refuse(refused: Refused, context: Context) -> NoReturn:
    """End the call with what the error table says about it."""
    metadata = trailing_metadata(refused.code, refused.retry_after_ms)
    await context.abort(status_of(refused.code), str(refused), metadata)
