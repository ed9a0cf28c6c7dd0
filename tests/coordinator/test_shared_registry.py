"""What a registry keeps beside the contract of ``test_registry.py`` when several coordinators have it open at once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_kit import until
from registry_kit import finish, outcome, plain, session, shown, turn

from kvferry.coordinator.errors import (
    CannotStart,
    RegistryUnavailable,
    SessionBusy,
    SessionExists,
    StaleEpoch,
    StateIncompatible,
    TurnElsewhere,
    TurnExists,
    UnknownSession,
    UnknownTurn,
)
from kvferry.coordinator.etcd import meta
from kvferry.coordinator.etcd.address import RegistryAddress
from kvferry.coordinator.etcd.registry import EtcdRegistry
from kvferry.coordinator.memory_registry import Ledger, MemoryRegistry
from kvferry.coordinator.registry import Registry

LEASE_S = 1
OpenOne = Callable[[], Awaitable[Registry]]


@pytest.fixture(params=["memory", "etcd"])
async def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenOne]:
    """Opens one more on the same state; each announces an address of its own."""
    opened: list[Registry] = []
    ledger = Ledger()
    members = request.getfixturevalue("etcd").endpoints if request.param == "etcd" else []

    async def another() -> Registry:
        if request.param == "memory":
            registry: Registry = await MemoryRegistry(ledger, is_shared=True).open("c")
        else:
            registry = await EtcdRegistry(members, tmp_path.name, LEASE_S).open("c")
        opened.append(registry)
        await registry.announce(f"host:{len(opened)}")
        return registry

    yield another
    for registry in opened:
        await registry.close()


@pytest.fixture
async def two(open_one: OpenOne) -> tuple[Registry, Registry]:
    return await open_one(), await open_one()


async def test_coordinators_share_the_id_and_the_generation_and_tell_each_other_apart(
    two: tuple[Registry, Registry],
) -> None:
    a, b = two
    assert (a.coordinator_id, a.generation) == (b.coordinator_id, b.generation)
    assert a.instance_id != b.instance_id
    assert (a.is_new, b.is_new) == (True, False)


async def test_an_open_turn_is_that_ones_who_began_it_for_as_long_as_it_lives(two: tuple[Registry, Registry]) -> None:
    a, b = two
    await a.create_session(session())
    await a.begin_turn(turn())
    epoch = await a.place_turn("s", "t1", "fp")
    for attempt in (
        b.claim_turn("s", "t1"), b.place_turn("s", "t1", "fp"), b.finish_turn("s", "t1", epoch, outcome(), [], 9),
    ):  # fmt: skip
        with pytest.raises(TurnElsewhere) as caught:
            await attempt
        assert caught.value.address == "host:1"
    assert await b.open_turns() == []
    assert (await b.counts()).n_open_turns == 1
    await a.claim_turn("s", "t1")
    await a.finish_turn("s", "t1", epoch, outcome(), [], 9)
    assert (await b.session_tokens("s")).tolist() == [1, 2, 3, 4]


async def test_a_turn_whose_coordinator_is_gone_is_the_first_claimants_at_a_higher_epoch(open_one: OpenOne) -> None:
    a, b, c = await open_one(), await open_one(), await open_one()
    await a.create_session(session())
    await a.begin_turn(turn())
    first = await a.place_turn("s", "t1", "fp")
    await a.close()
    assert [plain(t)["turn_id"] for t in await b.open_turns()] == ["t1"]
    claims = await asyncio.gather(b.claim_turn("s", "t1"), c.claim_turn("s", "t1"), return_exceptions=True)
    winner, loser = (b, c) if claims[0] is None else (c, b)
    assert [type(claim) for claim in claims if claim is not None] == [TurnElsewhere]
    assert await winner.place_turn("s", "t1", "fp") == first + 1
    with pytest.raises(TurnElsewhere):
        await loser.place_turn("s", "t1", "fp")
    with pytest.raises(StaleEpoch):
        await winner.finish_turn("s", "t1", first, outcome(), [], 9)
    await winner.finish_turn("s", "t1", first + 1, outcome(), [], 9)
    with pytest.raises(UnknownTurn):
        await loser.claim_turn("s", "t1")


async def test_of_coordinators_that_begin_turns_at_once_one_succeeds(two: tuple[Registry, Registry]) -> None:
    a, b = two
    await a.create_session(session())
    begun = await asyncio.gather(
        *(registry.begin_turn(turn(f"t{n}")) for n, registry in enumerate([a, b] * 5)), return_exceptions=True
    )
    assert begun.count(0) == 1
    assert {type(e) for e in begun if e != 0} == {SessionBusy}
    (open_turn,) = await a.list_turns("s")
    with pytest.raises(TurnExists):
        await b.begin_turn(turn(open_turn.turn_id))


async def test_one_keeps_house_and_another_one_does_when_it_is_gone(two: tuple[Registry, Registry]) -> None:
    a, b = two
    assert [await a.keeps_house(), await b.keeps_house(), await a.keeps_house()] == [True, False, True]
    await a.close()
    assert await b.keeps_house()


# etcd alone.


@pytest.fixture
async def open_etcd(etcd, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[EtcdRegistry]]]:
    opened: list[EtcdRegistry] = []

    async def another(**how: int) -> EtcdRegistry:
        opened.append(EtcdRegistry(etcd.endpoints, tmp_path.name, LEASE_S))
        return await opened[-1].open("c", **how)

    yield another
    for registry in opened:
        await registry.close()


OpenEtcd = Callable[..., Awaitable[EtcdRegistry]]


async def test_a_coordinator_that_falls_silent_loses_its_turns_with_its_lease(open_etcd: OpenEtcd) -> None:
    a, b = await open_etcd(), await open_etcd()
    await a.create_session(session())
    await a.begin_turn(turn())
    epoch = await a.place_turn("s", "t1", "fp")
    assert a._lease._beating is not None
    a._lease._beating.cancel()  # it is frozen: nothing is said, nothing is revoked

    async def is_claimed() -> bool:
        try:
            await b.claim_turn("s", "t1")
        except TurnElsewhere:
            return False
        return True

    await until(is_claimed)
    with pytest.raises(TurnElsewhere):  # it wakes up
        await a.finish_turn("s", "t1", epoch, outcome(), [], 9)
    assert await b.place_turn("s", "t1", "fp") == epoch + 1


async def test_who_serves_at_an_address_has_outlived_whoever_served_there(open_etcd: OpenEtcd) -> None:
    a, b, c = await open_etcd(), await open_etcd(), await open_etcd()
    await a.announce("host:1")
    await b.announce("host:2")
    await a.create_session(session())
    await a.begin_turn(turn())
    with pytest.raises(TurnElsewhere):
        await c.claim_turn("s", "t1")
    await c.announce("host:1")  # a was killed and started anew, before its lease ended
    await c.claim_turn("s", "t1")


async def test_the_operator_can_only_raise_the_generation(open_etcd: OpenEtcd) -> None:
    seen = [
        (await open_etcd(first_generation=first, generation_at_least=least)).generation
        for first, least in ((1_000, 0), (9_000, 0), (1, 7), (1, 5_000), (1, 0))
    ]
    assert seen == [1_000, 1_000, 1_000, 5_000, 5_000]


async def test_what_is_too_long_for_one_key_is_kept_in_pieces_and_goes_with_the_session(open_etcd: OpenEtcd) -> None:
    registry = await open_etcd()
    rng = np.random.default_rng(1)
    long_ids = tuple(int(n) for n in rng.integers(0, 2**31 - 1, 400_000))
    png = rng.bytes(3 << 20)
    await registry.create_session(session())
    begun = shown(turn(prompt=long_ids), "x")
    await registry.begin_turn(begun, {"x": png})
    long_answer = outcome(answer=long_ids[:300_000], logprobs=rng.bytes(2 << 20))
    await finish(registry, result=long_answer)
    (kept,) = await registry.list_turns("s")
    assert plain(kept) == plain(dataclasses.replace(begun, fingerprint="fp", epoch=1, outcome=long_answer))
    assert await registry.pixels(["x"]) == {"x": png}
    assert len(await registry.session_tokens("s")) == 700_000
    fork = await registry.fork_session("s", session("fork"), None)
    await registry.delete_session("s")
    assert fork.n_tokens == len(await registry.session_tokens("fork")) == 700_000
    await registry.delete_session("fork")
    left = await registry._etcd.all_in(registry._keys._key(""))
    assert [kv.key.split(b"/")[1] for kv in left] == [b"coordinators", b"epoch_floor", b"meta"]


async def test_a_fork_of_many_turns_takes_as_many_transactions_as_it_needs(open_etcd: OpenEtcd) -> None:
    registry = await open_etcd()
    await registry.create_session(session())
    for number in range(60):
        await registry.begin_turn(turn(f"t{number}", history=4 * number))
        await finish(registry, f"t{number}")
    fork = await registry.fork_session("s", session("f"), None)
    assert (fork.n_turns, fork.n_tokens) == (60, 240)
    assert [t.turn_id for t in await registry.list_turns("f")] == [f"t{number}" for number in range(60)]


async def test_a_registry_of_a_newer_version_is_refused_with_what_to_do(
    open_etcd: OpenEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_etcd()
    monkeypatch.setattr(meta, "LAYOUT", 0)
    with pytest.raises(StateIncompatible, match=r"version 1 .* another prefix"):
        await open_etcd()


async def test_without_etcd_the_start_is_refused_and_names_its_members() -> None:
    with pytest.raises(CannotStart, match=r"no member of etcd can be reached \(127.0.0.1:1, 127.0.0.1:2\)"):
        await EtcdRegistry(["127.0.0.1:1", "127.0.0.1:2"], "p").open("c")


async def test_something_else_under_our_keys_is_told(open_etcd: OpenEtcd) -> None:
    from kvferry.coordinator.etcd.client import put

    registry = await open_etcd()
    await registry._etcd.commit([], [put(registry._keys.session("s"), b"not ours")])
    with pytest.raises(RegistryUnavailable, match="no StoredSession of this version"):
        await registry.get_session("s")


@pytest.mark.parametrize(
    ("url", "endpoints", "prefix"),
    [
        ("etcd://a:1", ("a:1",), "kvferry"),
        ("etcd://a:1,10.0.0.2:2379,c:3/fleet.7", ("a:1", "10.0.0.2:2379", "c:3"), "fleet.7"),
    ],
)
def test_an_address_names_the_members_and_the_prefix(url: str, endpoints: tuple[str, ...], prefix: str) -> None:
    assert RegistryAddress.parse(url) == RegistryAddress(endpoints, prefix)
    assert RegistryAddress.parse(url.replace("etcd", "etcds", 1)) == RegistryAddress(endpoints, prefix, has_tls=True)


@pytest.mark.parametrize("url", ["", "a:1", "http://a:1", "etcd://", "etcd://a", "etcd://a:1,", "etcd://a:1/b/c"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        RegistryAddress.parse(url)


@pytest.mark.parametrize("second_turn", ["t1", "t2"])
async def test_a_turn_that_may_not_begin_takes_no_pixels_away_from_one_that_began_meanwhile(
    open_etcd: OpenEtcd, monkeypatch: pytest.MonkeyPatch, second_turn: str
) -> None:
    """The same request at two coordinators, which a client that lost its connection makes, or two requests."""
    first, second = await open_etcd(), await open_etcd()
    await first.create_session(session())
    keep = second._pixels.keep

    async def keep_and_be_overtaken(*what: Any) -> Any:
        added = await keep(*what)
        await first.begin_turn(shown(turn("t1"), "x"), {"x": b"X"})
        return added

    monkeypatch.setattr(second._pixels, "keep", keep_and_be_overtaken)
    with pytest.raises((TurnExists, SessionBusy)):
        await second.begin_turn(shown(turn(second_turn), "x"), {"x": b"X"})
    assert await first.pixels("x") == {"x": b"X"}
    await finish(first)
    await first.delete_session("s")
    assert await first.pixels("x") == {}


async def test_a_fork_onto_a_name_in_use_takes_no_pixels_away_from_who_has_the_name(
    open_etcd: OpenEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await open_etcd(), await open_etcd()
    await first.create_session(session("parent"))
    await first.begin_turn(shown(turn(session_id="parent"), "x"), {"x": b"X"})
    await finish(first, session_id="parent")
    keep = second._pixels.keep

    async def keep_and_be_overtaken(*what: Any) -> Any:
        added = await keep(*what)
        await first.fork_session("parent", session("fork"), None)
        return added

    monkeypatch.setattr(second._pixels, "keep", keep_and_be_overtaken)
    with pytest.raises(SessionExists):
        await second.fork_session("parent", session("fork"), None)
    await first.delete_session("parent")
    assert await first.pixels("x") == {"x": b"X"}


async def test_a_deleted_session_takes_no_pixels_away_from_one_that_gets_its_name(
    open_etcd: OpenEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await open_etcd(), await open_etcd()
    await first.create_session(session())
    await first.begin_turn(shown(turn(), "x"), {"x": b"X"})
    await finish(first)
    drop_uses = first._pixels.drop_uses

    async def be_overtaken_and_drop(*what: Any) -> None:
        await second.create_session(session())
        await second.begin_turn(shown(turn(), "x"), {"x": b"X"})
        await drop_uses(*what)

    monkeypatch.setattr(first._pixels, "drop_uses", be_overtaken_and_drop)
    await first.delete_session("s")
    assert await second.pixels("x") == {"x": b"X"}


def overtaken(monkeypatch: pytest.MonkeyPatch, registry: EtcdRegistry, by: Callable[[], Awaitable[object]]) -> None:
    """What is done ``by`` another coordinator comes once between the keeping of pixels and what they are kept for."""
    keep = registry._pixels.keep

    async def keep_and_be_overtaken(*what: Any) -> Any:
        kept = await keep(*what)
        monkeypatch.setattr(registry._pixels, "keep", keep)
        await by()
        return kept

    monkeypatch.setattr(registry._pixels, "keep", keep_and_be_overtaken)


async def test_turns_that_may_not_begin_at_once_leave_no_pixels(
    open_etcd: OpenEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await open_etcd(), await open_etcd()
    await first.create_session(session())
    await first.begin_turn(turn())

    async def may_not_begin(registry: EtcdRegistry, turn_id: str) -> None:
        with pytest.raises(SessionBusy):
            await registry.begin_turn(shown(turn(turn_id), "x"), {"x": b"X"})

    overtaken(monkeypatch, second, by=lambda: may_not_begin(first, "t2"))
    await may_not_begin(second, "t3")
    assert await first.pixels("x") == {}


async def test_forks_onto_a_name_that_another_one_gets_leave_no_pixels(
    open_etcd: OpenEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = await open_etcd(), await open_etcd(), await open_etcd()
    await first.create_session(session("parent"))
    await first.begin_turn(shown(turn(session_id="parent"), "x"), {"x": b"X"})
    await finish(first, session_id="parent")

    async def is_too_late(registry: EtcdRegistry) -> None:
        with pytest.raises(SessionExists):
            await registry.fork_session("parent", session("fork"), None)

    overtaken(monkeypatch, first, by=lambda: third.create_session(session("fork")))
    overtaken(monkeypatch, second, by=lambda: is_too_late(first))
    await is_too_late(second)
    await first.delete_session("parent")
    await first.delete_session("fork")
    assert await first.pixels("x") == {}


async def test_a_turn_does_not_begin_in_a_session_that_got_the_name_of_its_own(
    open_etcd: OpenEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pixels were kept for the one that is gone."""
    first, second = await open_etcd(), await open_etcd()
    await first.create_session(session())

    async def is_made_anew() -> None:
        await first.delete_session("s")
        await first.create_session(session())

    overtaken(monkeypatch, second, by=is_made_anew)
    with pytest.raises(UnknownSession):
        await second.begin_turn(shown(turn(), "x"), {"x": b"X"})
    assert await first.list_turns("s") == []
    assert await first.pixels("x") == {}
