"""The short calls: what they ask, what they give, and how they are asked again."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools

import grpc
import pytest

from kvferry.client import errors
from kvferry.client.sdk import (
    AsyncClient,
    AsyncSession,
    AsyncTurn,
    Client,
    FinishReason,
    Message,
    NodeState,
    Sampling,
    Session,
    Token,
    Turn,
    TurnState,
)
from kvferry.proto import status
from kvferry.proto.v1 import chat_pb2

from .scripted_coordinator import Refuse, ScriptedCoordinator, finished, started, tokens


@pytest.fixture
def client_address(coordinator: ScriptedCoordinator) -> str:
    return f"127.0.0.1:{coordinator.port}"


@pytest.fixture
async def client(client_address):
    names = (f"id-{n}" for n in itertools.count(1))
    async with AsyncClient(client_address, patience_s=5.0, new_id=lambda: next(names)) as client:
        yield client


async def test_a_session_lives_from_create_to_delete(client):
    session = await client.create_session()
    assert session.id == "id-1"
    details = await session.details()
    assert (details.session.session_id, details.token_ids) == ("id-1", (1, 2, 3))
    (turn,) = details.turns
    assert (turn.state, turn.answer, turn.messages) == (TurnState.FINISHED, "hi", (Message("user", "hello"),))
    assert (turn.finish_reason, turn.placements[0].node_id) == (FinishReason.END, "n1")
    fork = await session.fork(n_turns=0)
    assert fork.id == "id-2"
    assert [s.session_id for s in await client.list_sessions()] == ["id-1", "id-2"]
    await session.delete()
    with pytest.raises(errors.UnknownSession):
        await session.details()


async def test_a_fork_tells_no_turns_from_all_turns(client, coordinator):
    session = await client.create_session("a")
    await session.fork("b", n_turns=0)
    await session.fork("c")
    assert [call.HasField("n_turns") for call in coordinator.calls[1:]] == [True, False]


async def test_listing_turns_all_the_pages(client):
    for name in "abcde":
        await client.create_session(name)
    assert [s.session_id for s in await client.list_sessions()] == list("abcde")
    assert [s.session_id for s in await client.list_sessions(limit=3)] == list("abc")


async def test_nodes_and_status_are_values(client):
    (node,) = await client.nodes()
    assert (node.node_id, node.state, node.kv_bytes_budget) == ("n1", NodeState.LIVE, 1 << 30)
    found = await client.status()
    assert (found.coordinator_id, found.n_failovers, found.nodes) == ("c", 2, (node,))


async def test_what_lies_where_are_values(client):
    tree = await client.snapshots(max_prefixes=5, below="root")
    (prefix,) = tree.prefixes
    assert (tree.n_snapshots, tree.n_bytes, prefix.parent_id, prefix.n_snapshots) == (2, 70, "root", 2)
    places = await client.session("s").locate()
    assert (places.n_tokens, places.resident) == (9, (("a", 8),))
    assert (places.stored[0].n_tokens, places.stored[0].files) == (7, prefix.files)
    assert (prefix.files[0].name, prefix.files[0].start, prefix.files[0].used_at_ms) == ("kv3_0.kv", 4, 5)


async def test_a_call_is_asked_again_while_the_coordinator_is_away(client, coordinator):
    coordinator.refusals = [Refuse("starting", 10), Refuse("starting", 10)]
    assert await client.nodes()
    assert len(coordinator.calls) == 3


async def test_a_session_that_exists_is_an_error_only_when_it_was_not_ours(client, coordinator):
    await client.create_session("a")
    with pytest.raises(errors.SessionExists):
        await client.create_session("a")
    coordinator.refusals = [Refuse("starting", 10)]  # stands for a first try that worked, but whose reply was lost
    assert (await client.create_session("a")).id == "a"


async def test_deleting_again_after_a_lost_reply_is_no_error(client, coordinator):
    coordinator.refusals = [Refuse("starting", 10)]
    await client.session("gone").delete()
    with pytest.raises(errors.UnknownSession):
        await client.session("gone").delete()


async def test_sampling_may_come_as_single_fields(client, coordinator):
    coordinator.scripts = [[started("t"), finished(0)], [started("t"), finished(0)]]
    coordinator.echo_turn_id = True
    session = client.session("s")
    await session.generate("x", temperature=0.5, seed=7).collect()
    await session.generate("x", sampling=Sampling(seed=1, top_k=3), seed=7).collect()
    assert [(c.sampling.temperature, c.sampling.top_k, c.sampling.seed) for c in coordinator.calls] == [
        (0.5, 0, 7),
        (0, 3, 7),
    ]
    with pytest.raises(TypeError, match="temprature"):
        session.generate("x", temprature=1.0)


def test_the_sdk_can_be_imported_from_the_room_itself():
    from kvferry import client as room

    assert room.Client is Client
    with pytest.raises(ImportError):
        from kvferry.client import nonsense  # noqa: F401


BETWEEN_OUR_PROCESSES = {"stale_epoch", "stale_coordinator", "lease_lost", "node_id_taken"}


@pytest.mark.parametrize("code", sorted(status.STATUS_OF.keys() - BETWEEN_OUR_PROCESSES))
async def test_every_code_keeps_its_name_and_has_a_kind(client_address, coordinator, code):
    """A class of its own, or, for a code that is newer than this client, the one of its status."""
    coordinator.refusals = [Refuse(code)]
    async with AsyncClient(client_address, patience_s=0) as client:
        with pytest.raises(errors.ClientError) as caught:
            await client.nodes()
    assert caught.value.code == code
    assert isinstance(caught.value, errors.CLASS_OF.get(code, errors.ClientError))
    kinds = errors.BadRequest | errors.NotFound | errors.Conflict | errors.Refused | errors.NotNow | errors.ServerFault
    assert isinstance(caught.value, kinds)


@pytest.mark.parametrize(
    ("code", "base"),
    [
        ("prompt_too_long", errors.BadRequest),
        ("unknown_turn", errors.NotFound),
        ("session_busy", errors.Conflict),
        ("no_node", errors.Unavailable),
        ("queue_full", errors.Overloaded),
    ],
)
async def test_errors_can_be_caught_by_kind(client_address, coordinator, code, base):
    coordinator.refusals = [Refuse(code)]
    async with AsyncClient(client_address, patience_s=0) as client:
        with pytest.raises(base, match=f"Refused with {code}"):
            await client.nodes()


async def test_something_that_is_no_coordinator_is_told_apart():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(errors.ServerFault, match="no kvferry coordinator"):
            await client.status()
    await server.stop(0)


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        (Sampling(top_k=-1), "top_k cannot be -1"),
        (Sampling(seed=2**64), "seed cannot be"),
        (Sampling(temperature="hot"), "temperature cannot be 'hot'"),  # type: ignore[arg-type]
    ],
)
async def test_values_no_message_can_hold_are_named(client, sampling, sentence):
    with pytest.raises(errors.InvalidSampling, match=sentence):
        client.session("s").generate("x", sampling=sampling)


async def test_a_negative_limit_is_an_invalid_request(client):
    with pytest.raises(errors.InvalidRequest):
        client.session("s").generate("x", max_tokens=-1)


@pytest.mark.parametrize(("plain", "asynchronous"), [(Client, AsyncClient), (Session, AsyncSession), (Turn, AsyncTurn)])
def test_the_sync_classes_have_the_shape_of_the_async_ones(plain, asynchronous):
    def shape(cls):
        members = {name.replace("aclose", "close"): m for name, m in vars(cls).items() if not name.startswith("_")}
        return {
            name: "property" if isinstance(m, property) else list(inspect.signature(m).parameters.values())
            for name, m in members.items()
        }

    wanted, found = shape(asynchronous), shape(plain)
    wanted.pop("id", None), found.pop("id", None)  # an attribute there, a property here
    wanted.pop("session_id", None), found.pop("session_id", None)
    assert found == wanted


def run_sync(address: str) -> tuple[list, str]:
    with Client(address, new_id=lambda: "turn-1") as client:
        session = client.create_session("s")
        events = list(session.generate("hello"))
        answer = session.generate("hello").collect()
        assert client.session("s").details().turns
        assert client.nodes()[0].node_id == client.status().nodes[0].node_id
        with pytest.raises(errors.UnknownSession):
            client.session("t").details()
        session.fork("t").delete()
        assert [s.session_id for s in client.list_sessions()] == ["s"]
        return events, answer.text


async def test_the_sync_client_does_the_same_in_a_thread_of_its_own(coordinator, client_address):
    import asyncio

    coordinator.scripts = [[started(), *tokens(0, 3), finished(3)], [started(), *tokens(0, 2), finished(2)]]
    events, text = await asyncio.to_thread(run_sync, client_address)
    assert [e.sequence for e in events if isinstance(e, Token)] == [0, 1, 2]
    assert text == "w0 w1 !"
    assert isinstance(coordinator.calls[-1], chat_pb2.ListSessionsRequest)


def test_a_client_without_a_coordinator_closes_at_once():
    with Client("127.0.0.1:1", patience_s=0) as client, pytest.raises(errors.Unavailable):
        client.nodes()
    client.close()


def test_closing_ends_what_calls_left_to_be_done_without_a_complaint(caplog):
    client = Client("127.0.0.1:1")
    ended = []

    async def lingering():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def leave_it():
        kept.append(asyncio.create_task(lingering()))
        await asyncio.sleep(0)

    kept: list[asyncio.Task[None]] = []
    client._loop.run(leave_it())
    client.close()
    assert ended == [True]
    kept.clear()
    gc.collect()
    assert "Task was destroyed" not in caplog.text
