"""What no message can carry is refused by the SDK with the field, the value and its bounds; and it prints nothing."""

from __future__ import annotations

import logging

import pytest

from kvferry.client.errors import (
    BadRequest,
    InvalidAddress,
    InvalidRequest,
    InvalidSampling,
    RequestTooLarge,
    Unavailable,
    _reason_of,
)
from kvferry.client.sdk import AsyncClient, Client, Message, RawPrompt
from kvferry.client.sdk.retry import Outage, Patience
from kvferry.proto.channel import MAX_MESSAGE_BYTES
from kvferry.proto.v1 import chat_pb2

from .scripted_coordinator import Refuse, ScriptedCoordinator, finished, started

LONE = "a\udcff"


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"top_k": 2**32}, InvalidSampling, "top_k cannot be 4294967296: it is a whole number from 0 to 4294967295."),
        ({"top_k": -1}, InvalidSampling, "top_k cannot be -1"),
        ({"seed": 2**64}, InvalidSampling, "seed .* from 0 to 18446744073709551615"),
        ({"repetition_window": -5}, InvalidSampling, "repetition_window cannot be -5"),
        ({"temperature": "hot"}, InvalidSampling, "temperature cannot be 'hot': it is a number"),
        ({"max_tokens": 2**40}, InvalidRequest, "max_tokens cannot be 1099511627776: it is .* 0 to 4294967295"),
        ({"max_tokens": -1}, InvalidRequest, "max_tokens cannot be -1"),
        ({"stop": [LONE]}, InvalidRequest, "stop is not valid Unicode: character 2"),
        ({"stop": 5}, InvalidRequest, "stop cannot be 5: it is a text"),
        ({"turn_id": LONE}, InvalidRequest, "turn_id is not valid Unicode"),
    ],
)
async def test_a_turn_with_a_value_that_no_message_can_carry(fields, error, words):
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(error, match=words):
            client.session("s").generate("hello", **fields)


@pytest.mark.parametrize("wrong", [2**31, "x", None])
async def test_of_many_tokens_the_wrong_one_is_named(wrong):
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest) as caught:
            client.session("s").generate(RawPrompt([*range(1000), wrong]))
    assert str(caught.value) == f"token_ids cannot be {wrong!r}: it is a whole number from -2147483648 to 2147483647."


@pytest.mark.parametrize(
    "message", [LONE, [Message("user", LONE)], [Message(LONE, "x")], [Message("user", 5)]], ids=repr
)
async def test_a_message_that_is_no_text(message):
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match=r"(content|role) (is not valid Unicode|cannot be 5)"):
            client.session("s").generate(message)


async def test_short_calls_check_theirs_too():
    async with AsyncClient("127.0.0.1:1", patience_s=0) as client:
        session = client.session(LONE)
        for call in (
            client.create_session(LONE),
            session.details(),
            session.delete(),
            session.cancel("t"),
            session.fork(),
            client.session("s").fork(n_turns=2**40),
            client.session("s").fork(n_tokens=-1),
            anext(session.resume()),
            anext(client.session("s").resume(from_index=-1)),
        ):
            with pytest.raises(InvalidRequest, match=r"(session_id|n_turns|n_tokens|from_index) "):
                await call


async def test_zero_that_is_asked_for_is_not_the_default(coordinator: ScriptedCoordinator):
    coordinator.scripts = [[started("t"), finished(0)]]
    coordinator.echo_turn_id = True
    async with AsyncClient(f"127.0.0.1:{coordinator.port}") as client:
        await client.session("s").generate("hello", turn_id="t", temperature=0.0, repetition_window=0).collect()
    sampling = coordinator.calls[-1].sampling
    assert (sampling.HasField("temperature"), sampling.HasField("repetition_window")) == (True, True)
    assert not sampling.HasField("top_k")


def test_a_request_beyond_the_limit_names_it():
    with Client("127.0.0.1:1") as client, pytest.raises(RequestTooLarge, match=r"33,554,432 \(32 MiB\)"):
        client.session("s").generate("x" * (MAX_MESSAGE_BYTES + 1))


async def test_an_answer_beyond_the_limit_names_it(coordinator: ScriptedCoordinator):
    long_name = "x" * (MAX_MESSAGE_BYTES + 1)
    coordinator.sessions["s"] = chat_pb2.Session(session_id="s", model=long_name)
    async with AsyncClient(f"127.0.0.1:{coordinator.port}") as client:
        with pytest.raises(RequestTooLarge, match="more than the 32 MiB"):
            await client.session("s").details()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        ":7070",
        "host:",
        "host:port",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "127.0.0.1:99999999999",
        "a b:1",
        "1:2:3",
        "[::1]",
        "[::1]:0",
        "host:-1",
        "host:1\n",
    ],
)
def test_an_address_that_is_none_is_refused_before_grpc_sees_it(address):
    with pytest.raises(InvalidAddress, match=r"address .* (is not HOST:PORT|not from 1 to 65535)"):
        Client(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "board-1.local:65535", "[::1]:7070", "my_host:07070"])
def test_addresses(address):
    with Client(address) as client:
        assert client.address == address


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Connection refused",
            "connection refused",
        ),
        (
            "DNS resolution failed for x:1: [C-ares status is not ARES_SUCCESS: Domain name not found]",
            "domain name not found",
        ),
        ("no brackets", "no brackets"),
        ("", "no reason given"),
        (
            "Ssl handshake failed: TSI_PROTOCOL_FAILURE: SSL_ERROR_SSL: certificate verify failed: OK",
            "the TLS handshake failed",
        ),
    ],
)
def test_the_reason_is_the_systems_own_words(said, reason):
    assert _reason_of(said) == reason


async def test_an_outage_is_told_at_once_and_once_and_nowhere_else(coordinator, caplog, capfd):
    coordinator.refusals = [Refuse("registry_unavailable", 10)] * 3
    told = []
    async with AsyncClient(
        f"127.0.0.1:{coordinator.port}", patience_s=20, on_outage=lambda error, s: told.append((error.code, s))
    ) as client:
        with caplog.at_level(logging.DEBUG):
            await client.nodes()
    assert told == [("registry_unavailable", 20)]
    assert [record for record in caplog.records if record.name.startswith(("stamina", "kvferry"))] == []
    assert capfd.readouterr() == ("", "")


def test_an_outage_ends_with_patience_and_waits_ever_longer():
    clock = [0.0]
    outage = Outage(Patience(5), now=lambda: clock[0], jitter=lambda most: 0.0)
    assert [outage.delay_after(Unavailable("x")) for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert outage.delay_after(Unavailable("x", retry_after_s=0.7)) == 0.7
    assert outage.delay_after(Unavailable("x", retry_after_s=700)) == 30
    with pytest.raises(BadRequest):
        outage.delay_after(BadRequest("x"))
    clock[0] = 5.0
    with pytest.raises(Unavailable):
        outage.delay_after(Unavailable("x"))
