"""Bytes that are not the message a method takes: the caller's mistake, not a bug of ours.

gRPC itself would answer UNKNOWN and log a traceback for each of them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvferry.proto.handlers import put_around
from kvferry.proto.status import status_of, trailing_metadata

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class _Malformed:
    """Stands for a request that could not be parsed."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes


class MalformedRefused(grpc.aio.ServerInterceptor):
    """Answers them INVALID_ARGUMENT, code ``invalid_request``, with one line in the log. For every kind of method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's handler, behind a look at what was parsed."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:  # no such method, or one that takes any bytes
            return handler  # type: ignore[no-any-return]
        return _guarded(handler, str(handler_call_details.method))


def _guarded(handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    checked = _checked_each if handler.request_streaming else _checked_one
    tolerant = _tolerant(handler.request_deserializer)
    return put_around(handler, lambda behaviour: checked(behaviour, method), tolerant)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed(len(data))

    return parse


def _checked_one(behaviour: Callable[[Any, Context], Any], method: str) -> Callable[[Any, Context], Any]:
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            if isinstance(request, _Malformed):
                await _refuse(request, context, method)
            async for message in behaviour(request, context):
                yield message

        return stream

    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            await _refuse(request, context, method)
        return await behaviour(request, context)

    return call


def _checked_each(behaviour: Callable[[Any, Context], Any], method: str) -> Callable[[Any, Context], Any]:
    async def requests(given: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in given:
            if isinstance(request, _Malformed):
                await _refuse(request, context, method)
            yield request

    if inspect.isasyncgenfunction(behaviour):

        async def stream(given: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async for message in behaviour(requests(given, context), context):
                yield message

        return stream

    async def call(given: AsyncIterator[Any], context: Context) -> Any:
        return await behaviour(requests(given, context), context)

    return call


async def _refuse(request: _Malformed, context: Context, method: str) -> None:
    said = f"the {request.n_bytes} bytes sent to {method} are not the message it takes"
    log.warning("refused a call from %s: %s", context.peer(), said)
    await context.abort(status_of("invalid_request"), said, trailing_metadata("invalid_request"))
