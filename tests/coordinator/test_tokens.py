"""API tokens at a real coordinator: whose sessions they see, how much they may ask, and that revoking holds at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_kit import Cluster, eventually
from free_ports import free_port
from scripted_worker import Script

from kvferry.client import AsyncClient, NotFound, Token
from kvferry.client.errors import PermissionDenied, RateLimited, TooManyTurns, Unauthenticated
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.trust.tokens import change_tokens, new_token, revoked

Start = Callable[..., Any]


class Keys:
    """A tokens file, and what it holds the hashes of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, tenant: str, **limits: Any) -> str:
        text, token = new_token(tenant, **limits)
        change_tokens(self.path, lambda present: [*present, token], may_be_new=True)
        return text

    def revoke(self, text: str) -> None:
        change_tokens(self.path, lambda present: revoked(present, text.split("_")[1]))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "tokens.json")


def speaking(cluster: Cluster, token: str | None) -> AsyncClient:
    return AsyncClient(cluster.address, token=token, patience_s=0)


async def test_without_a_token_nothing_is_answered_but_how_the_fleet_is(new_cluster: Start, keys: Keys) -> None:
    keys.add("acme")
    address = f"127.0.0.1:{free_port()}"
    cluster = await new_cluster(tokens=keys.path, metrics=address)
    for token in (None, "kvf_000000000000_" + "A" * 43, "nonsense"):
        async with speaking(cluster, token) as client:
            with pytest.raises(Unauthenticated):
                await client.create_session()
            with pytest.raises(Unauthenticated):
                await client.models()
            assert await client.nodes() == []
    told = await asyncio.to_thread(lambda: httpx.get(f"http://{address}/metrics").text)
    assert 'kvferry_calls_refused_total{code="unauthenticated"} 6.0' in told


async def test_a_tenant_sees_its_own_sessions_and_no_others(new_cluster: Start, keys: Keys) -> None:
    acme, umbrella = keys.add("acme"), keys.add("umbrella")
    cluster = await new_cluster(tokens=keys.path)
    await cluster.worker("a")
    async with speaking(cluster, acme) as mine, speaking(cluster, umbrella) as theirs:
        session = await mine.create_session("plans")
        await session.generate("a secret", max_tokens=3, turn_id="t").collect()
        assert (await session.details()).session.tenant == "acme"
        foreign = theirs.session("plans")
        for attempt in (
            foreign.details(), foreign.delete(), foreign.fork("mine-now"), foreign.export(), foreign.cancel("t"),
            foreign.generate("go on", max_tokens=1).collect(), foreign.resume("t").collect(),
        ):  # fmt: skip
            with pytest.raises(NotFound, match="there is no session plans"):
                await attempt
        assert [s.session_id for s in await theirs.list_sessions()] == []
        assert [s.session_id for s in await mine.list_sessions()] == ["plans"]
        with pytest.raises(PermissionDenied, match="for tenant umbrella"):
            await theirs.create_session(tenant="acme")
        exported = await session.export()
        taken = await theirs.import_session(exported.data, "copy")
        assert (await taken.details()).session.tenant == "umbrella", "what one brings is one's own"


async def test_listing_finds_ones_own_among_many_of_others(new_cluster: Start, keys: Keys) -> None:
    acme, umbrella = keys.add("acme"), keys.add("umbrella")
    cluster = await new_cluster(tokens=keys.path)
    async with speaking(cluster, acme) as mine, speaking(cluster, umbrella) as theirs:
        for number in range(30):
            await (mine if number % 10 == 0 else theirs).create_session(f"s{number}")
        assert {s.session_id for s in await mine.list_sessions()} == {"s0", "s10", "s20"}


async def test_requests_beyond_the_limit_are_told_when_to_come_back(new_cluster: Start, keys: Keys) -> None:
    token = keys.add("acme", requests_per_minute=3)
    cluster = await new_cluster(tokens=keys.path)
    await cluster.worker("a")
    async with speaking(cluster, token) as client:
        session = await client.create_session()
        for _ in range(3):
            await session.generate("go on", max_tokens=1).collect()
        with pytest.raises(RateLimited) as told:
            await session.generate("go on", max_tokens=1).collect()
    assert told.value.retry_after_s is not None
    assert 0 < told.value.retry_after_s <= 21


async def test_turns_at_once_are_counted_while_they_run_and_not_after(new_cluster: Start, keys: Keys) -> None:
    token = keys.add("acme", concurrent_turns=1)
    cluster = await new_cluster(tokens=keys.path)
    worker = await cluster.worker("a", Script(token_seconds=0.02))
    async with speaking(cluster, token) as client:
        one, other = await client.create_session(), await client.create_session()
        running = asyncio.create_task(one.generate("a story", max_tokens=20).collect())
        await eventually(lambda: worker.requests)
        with pytest.raises(TooManyTurns) as told:
            await other.generate("too much", max_tokens=1).collect()
        assert told.value.retry_after_s == 1.0
        await running
        await other.generate("now", max_tokens=1).collect()


async def test_a_revoked_token_ends_the_stream_that_it_has_open(new_cluster: Start, keys: Keys) -> None:
    token = keys.add("acme")
    cluster = await new_cluster(tokens=keys.path)
    await cluster.worker("a", Script(token_seconds=0.05))
    async with speaking(cluster, token) as client:
        session = await client.create_session()
        events = session.generate("a long story", max_tokens=200)
        while not isinstance(await anext(events), Token):
            pass
        keys.revoke(token)
        with pytest.raises(Unauthenticated, match="revoked"):
            await events.collect()


async def test_whoever_has_no_token_to_show_speaks_as_before_where_none_is_asked(new_cluster: Start) -> None:
    client = (await new_cluster()).client()
    session = await client.new_session(tenant="anything")
    assert (await client.get(session)).session.tenant == "anything"


async def test_a_turn_whose_caller_is_gone_before_it_has_begun_counts_as_his_all_the_same(
    new_cluster: Start, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = keys.add("acme", concurrent_turns=1)
    cluster = await new_cluster(tokens=keys.path)
    worker = await cluster.worker("a", Script(token_seconds=0.1))
    begin, writing, go_on = SqliteRegistry.begin_turn, asyncio.Event(), asyncio.Event()

    async def slow_disk(self: SqliteRegistry, *what: Any) -> int:
        writing.set()
        await go_on.wait()
        return await begin(self, *what)

    async with speaking(cluster, token) as client:
        one, other = await client.create_session(), await client.create_session()
        monkeypatch.setattr(SqliteRegistry, "begin_turn", slow_disk)
        asking = asyncio.create_task(one.generate("a story", max_tokens=20).collect())
        await writing.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.1)  # the coordinator hears that he is gone
        go_on.set()
        await eventually(lambda: worker.requests)
        with pytest.raises(TooManyTurns):
            await other.generate("too much", max_tokens=1).collect()
