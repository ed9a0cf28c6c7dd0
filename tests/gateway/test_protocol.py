"""What comes over a connection has an end before it is a request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from threading import Thread

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from kvferry.gateway.protocol import MAX_HEAD_BYTES, HttpProtocol

ASK = b"POST /length HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n%s\r\n"


async def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{len(await request.body())} bytes, {len(request.headers)} headers")


async def count(request: Request) -> StreamingResponse:
    async def numbers() -> AsyncGenerator[str]:
        for number in range(3):
            yield f"{number} "

    return StreamingResponse(numbers())


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """To a server that speaks the gateway's protocol."""
    app = Starlette(routes=[Route("/length", length, methods=["POST"]), Route("/count", count)])
    config = uvicorn.Config(app, http=HttpProtocol, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        with socket.create_connection(listening.getsockname(), timeout=10) as connected:
            yield connected
        server.should_exit = True
        thread.join(10)


def test_headers_without_end_are_refused_and_the_connection_is_closed(connection):
    connection.sendall(b"POST /length HTTP/1.1\r\nhost: here\r\nx-long: ")
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        connection.sendall(b"x" * (100 * MAX_HEAD_BYTES))


def test_large_bodies_and_requests_one_after_the_other_are_no_head(connection):
    body = b"x" * (3 * MAX_HEAD_BYTES)
    for n_headers in (0, 20):
        more = b"".join(b"x-%d: y\r\n" % number for number in range(n_headers))
        connection.sendall(ASK % (len(body), more) + body)
        answer = b""
        while b" headers" not in answer:
            piece = connection.recv(65536)
            assert piece, answer
            answer += piece
        assert f"{len(body)} bytes, {2 + n_headers} headers".encode() in answer


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(connection):
    connection.sendall(b"GET /count HTTP/1.0\r\n\r\n")
    head, _, body = all_of(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert body == b"0 1 2 "


def test_an_answer_with_a_length_is_for_http_1_0_what_it_always_is(connection):
    connection.sendall(b"POST /length HTTP/1.0\r\ncontent-length: 2\r\n\r\nhi")
    head, _, body = all_of(connection).partition(b"\r\n\r\n")
    assert b"content-length: 18" in head
    assert body == b"2 bytes, 1 headers"


def test_a_stream_for_http_1_1_has_chunks(connection):
    connection.sendall(b"GET /count HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
    head, _, body = all_of(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"0\r\n\r\n")
