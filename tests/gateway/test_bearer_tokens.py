"""API keys of HTTP requests reach a real coordinator over mutual TLS; what it refuses has OpenAI's shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.client import AsyncClient
from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.loaded_model import LoadedModel, load_all
from kvferry.coordinator.opening import open_registry
from kvferry.coordinator.server import serve
from kvferry.gateway.app import create_app
from kvferry.gateway.bearer import given_token
from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.context import Context
from kvferry.gateway.dashboard.watcher import Watchers
from kvferry.gateway.models import Models
from kvferry.gateway.process import make_dashboard
from kvferry.trust.authority import Authority
from kvferry.trust.bearer import Secret
from kvferry.trust.certificates import Role
from kvferry.trust.handing_out import issue
from kvferry.trust.tokens import new_token, write_tokens

CHAT = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


@dataclass
class Served:
    http: httpx.AsyncClient
    acme: str
    limited: str

    async def post(self, key: str | None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.post("/v1/chat/completions", json=CHAT, headers=headers)

    async def get(self, path: str, key: str | None) -> httpx.Response:
        return await self.http.get(path, headers={} if key is None else {"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def models(smollm2_path: Path) -> Sequence[LoadedModel]:
    return load_all((str(smollm2_path),), 1024)


@pytest.fixture
async def served(tmp_path: Path, models: Sequence[LoadedModel]) -> AsyncIterator[Served]:
    """A coordinator without nodes: whoever is let in is told that there is none."""
    authority = Authority.create(tmp_path / "ca", "test")
    for name, role in (("head", Role.COORDINATOR), ("gateway", Role.GATEWAY)):
        issue(authority, tmp_path / name, name, role, ["127.0.0.1"], 60)
    (acme, kept), (limited, limited_kept) = new_token("acme"), new_token("acme", requests_per_minute=1)
    write_tokens(tmp_path / "tokens", [kept, limited_kept])
    settings = CoordinatorSettings(
        model="unused", listen="127.0.0.1:0", state=tmp_path / "state", tls_dir=tmp_path / "head",
        tokens=tmp_path / "tokens", no_node_wait=0.1,
    )  # fmt: skip
    async with open_registry(settings) as registry, serve(settings, models, registry) as address:
        client = AsyncClient(address, patience_s=0, tls_dir=tmp_path / "gateway", token=given_token)
        dashboard = make_dashboard(GatewayConfig(coordinator=address, dashboard="all"), client, lambda: 0.0)
        numbers = iter(range(1000))

        def context() -> Context:
            return Context(
                client=client, models=Models(client, time.monotonic), dashboard=dashboard,
                keep_seconds=60, keep_responses_seconds=60, new_id=lambda: f"id{next(numbers)}",
                new_seed=lambda: 1, wall_clock=time.time,
            )  # fmt: skip

        app = create_app(context)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://g") as http,
        ):
            yield Served(http, acme, limited)


def code_of(response: httpx.Response) -> Any:
    return response.json()["error"]["code"]


async def test_a_key_that_is_not_right_is_refused_as_openai_does(served: Served) -> None:
    wrong, _ = new_token("acme")
    for key in (None, wrong, "sk-unknown", "several words"):
        for response in (await served.post(key), await served.get("/v1/models", key)):
            assert (response.status_code, code_of(response)) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert wrong not in response.text
    assert (await served.post(served.acme)).status_code == 503, "let in: there is no node"
    assert (await served.get("/v1/models", served.acme)).status_code == 200


async def test_one_callers_key_does_not_open_the_door_for_the_next(served: Served) -> None:
    for _ in range(3):
        right, without = await asyncio.gather(served.post(served.acme), served.post(None))
        assert (right.status_code, without.status_code) == (503, 401)
        assert (await served.get("/v1/models", None)).status_code == 401, "a list that was fetched for somebody else"


async def test_a_limit_says_when_to_come_back(served: Served) -> None:
    await served.post(served.limited)
    response = await served.post(served.limited)
    assert (response.status_code, code_of(response)) == (429, "rate_limit_exceeded")
    assert 0 < int(response.headers["retry-after"]) <= 60


async def test_health_needs_no_key_and_conversations_do(served: Served) -> None:
    assert (await served.get("/health", None)).json()["status"] == "no_node"
    assert (await served.get("/dashboard/sessions", None)).status_code == 401
    assert (await served.get("/dashboard/sessions", served.acme)).json() == []


def test_whoever_watches_with_another_key_has_another_watcher() -> None:
    watchers = Watchers(AsyncClient("127.0.0.1:1"), lambda: 0.0)
    assert watchers.of(Secret("a")) is watchers.of(Secret("a"))
    assert watchers.of(Secret("a")) is not watchers.of(Secret("b"))


def test_tokens_stay_where_they_would_go_out_in_clear(tmp_path: Path) -> None:
    assert GatewayConfig(coordinator="127.0.0.1:7070").hands_tokens_on
    assert not GatewayConfig(coordinator="127.0.0.1:7070,192.0.2.1:7070").hands_tokens_on
    assert GatewayConfig(coordinator="192.0.2.1:7070", tls_dir=tmp_path).hands_tokens_on
