"""What the gateway tells a monitor: an application of a few routes under its middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.gateway.metrics import Counted, GatewayMetrics


class Ticking:
    """Seconds that pass when asked for the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    return {
        " ".join([s.name, *(v for k, v in s.labels.items() if k != "le")]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if not s.name.endswith(("_created", "_bucket"))
    }


def application(begun: asyncio.Event, more: asyncio.Event) -> httpx.AsyncClient:
    async def whole(request: Request) -> Response:
        return PlainTextResponse("hello " + request.path_params["name"])

    async def streamed(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            begun.set()
            await more.wait()
            yield b"data: 2\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    metrics = GatewayMetrics(clock=Ticking())

    async def buggy(request: Request) -> Response:
        raise AssertionError(request.url.path)

    routes = [
        Route("/whole/{name}", whole),
        Route("/buggy", buggy),
        Route("/streamed", streamed, methods=["POST"]),
        Route("/metrics", metrics.answer),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(Counted, metrics=metrics, routes=routes)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://gateway")


async def test_requests_are_counted_by_route_and_never_by_what_a_client_wrote():
    async with application(asyncio.Event(), asyncio.Event()) as client:
        await client.get("/whole/secret-id")
        await client.get("/whole/another")
        await client.request("BREW", "/nowhere/secret-id")
        found = await samples(client)
        text = (await client.get("/metrics")).text
    assert found["kvferry_gateway_requests_total GET /whole/{name} 200"] == 2
    assert found["kvferry_gateway_requests_total other other 404"] == 1
    assert found["kvferry_gateway_response_bytes_total /whole/{name}"] == len("hello secret-id" + "hello another")
    assert found["kvferry_gateway_first_byte_seconds_count /whole/{name}"] == 2
    assert (
        found["kvferry_gateway_request_seconds_sum /whole/{name}"]
        > found["kvferry_gateway_first_byte_seconds_sum /whole/{name}"]
    )
    assert "secret-id" not in text
    assert "BREW" not in text


async def test_a_bug_counts_as_the_status_that_its_client_is_told():
    async with application(asyncio.Event(), asyncio.Event()) as client:
        assert (await client.get("/buggy")).status_code == 500
        found = await samples(client)
    assert found["kvferry_gateway_requests_total GET /buggy 500"] == 1


async def test_a_stream_counts_as_open_while_it_lasts():
    begun, more = asyncio.Event(), asyncio.Event()
    async with application(begun, more) as client:
        streaming = asyncio.create_task(client.post("/streamed"))
        await begun.wait()
        assert (await samples(client))["kvferry_gateway_streams_open"] == 1
        more.set()
        await streaming
        found = await samples(client)
    assert found["kvferry_gateway_streams_open"] == 0
    assert found["kvferry_gateway_requests_total POST /streamed 200"] == 1
