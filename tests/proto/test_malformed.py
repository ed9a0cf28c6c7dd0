"""Bytes that no message is made of, sent to every kind of method."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.proto.malformed import MalformedRefused
from kvferry.proto.status import CODE_KEY
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc

GARBAGE = b"\xff" * 40


class Chat(chat_pb2_grpc.ChatServiceServicer):
    """One method that answers once, one that streams by yielding."""

    async def ListNodes(self, request: Any, context: Any) -> chat_pb2.ListNodesResponse:  # noqa: N802 - the wire
        return chat_pb2.ListNodesResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[chat_pb2.GenerateResponse]:  # noqa: N802 - the wire
        yield chat_pb2.GenerateResponse()
        yield chat_pb2.GenerateResponse()


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[MalformedRefused()])
    chat_pb2_grpc.add_ChatServiceServicer_to_server(Chat(), server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(("kvferry.v1.ChatService", reflection.SERVICE_NAME), server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def answers(channel: grpc.aio.Channel, method: str, data: bytes, n: int = 1) -> int:
    """The first n messages, counted, whatever kind of method it is."""
    if method.endswith("ServerReflectionInfo"):
        call: Any = channel.stream_stream(method)(iter([data]))
    elif method.endswith(("Generate", "Watch")):
        call = channel.unary_stream(method)(data)
    else:
        await channel.unary_unary(method)(data)
        return 1
    count = 0
    async for _ in call:
        count += 1
        if count == n:
            break
    call.cancel()
    return count


METHODS = (
    "/kvferry.v1.ChatService/ListNodes",
    "/kvferry.v1.ChatService/Generate",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


@pytest.mark.parametrize("method", METHODS)
async def test_garbage_is_the_callers_mistake_and_one_line_in_the_log(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(channel, method, GARBAGE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"the 40 bytes sent to {method} are not the message" in str(caught.value.details())
    assert dict(caught.value.trailing_metadata() or ())[CODE_KEY] == "invalid_request"
    (record,) = caplog.records
    assert record.exc_info is None
    assert method in record.getMessage()


@pytest.mark.parametrize("method", METHODS)
async def test_what_is_a_message_gets_through(channel: grpc.aio.Channel, method: str) -> None:
    data = b"\x3a\x00" if "reflection" in method else b""  # list_services = ""
    n = 2 if method.endswith("Generate") else 1
    assert await answers(channel, method, data, n) == n


async def test_a_method_that_is_not_there_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/kvferry.v1.ChatService/Nonsense")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
