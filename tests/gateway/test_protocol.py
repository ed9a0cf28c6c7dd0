"""What comes over a connection has an end before it is a request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from threading import Thread

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvferry.gateway.protocol import MAX_HEAD_BYTES, HttpProtocol

ASK = b"POST /length HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n%s\r\n"


async def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{len(await request.body())} bytes, {len(request.headers)} headers")


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """To a server that speaks the gateway's protocol."""
    app = Starlette(routes=[Route("/length", length, methods=["POST"])])
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
