"""A turn that became durable runs, whatever became of the call that began it. Found by the simulator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster_kit import (
    Cluster,
    all_of,
    code_of,
    eventually,
    ids_of,
    read_while_it_lasts,
    resume_until_served,
    take_tokens,
    until,
)
from etcd_cluster import EtcdCluster
from scripted_worker import Script

from kvferry.coordinator.errors import RegistryUnavailable, Stopping
from kvferry.coordinator.etcd.new_sessions import NewSessions
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.coordinator.turn_runner import TurnRunner
from kvferry.coordinator.turns import Turns
from kvferry.proto.v1 import chat_pb2, common_pb2


async def test_a_client_that_leaves_while_its_turn_becomes_durable_leaves_a_turn_that_runs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    writing, go_on = asyncio.Event(), asyncio.Event()
    real = SqliteRegistry.begin_turn

    async def slow_disk(self: SqliteRegistry, turn: object, *more: Any) -> int:
        writing.set()
        await go_on.wait()
        return await real(self, turn, *more)

    monkeypatch.setattr(SqliteRegistry, "begin_turn", slow_disk)
    asking = asyncio.ensure_future(all_of(client.generate(session, turn_id="t")))
    await writing.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(0.1)  # the coordinator hears that the client is gone
    go_on.set()

    async def is_answered() -> bool:
        return [t.n_answer_tokens for t in (await client.get(session)).turns] == [8]

    await until(is_answered)


async def test_a_turn_whose_beginning_failed_after_it_was_durable_is_taken_up_by_whoever_asks_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    real = SqliteRegistry.begin_turn

    async def commits_and_fails(self: SqliteRegistry, turn: object, *more: Any) -> None:
        await real(self, turn, *more)
        raise RegistryUnavailable("the registry failed: disk I/O error")

    monkeypatch.setattr(SqliteRegistry, "begin_turn", commits_and_fails)
    with pytest.raises(Exception, match="disk I/O error"):
        await all_of(client.generate(session, turn_id="t"))
    assert (await client.get(session)).session.open_turn_id == "t"
    events = await all_of(client.generate(session, turn_id="t"))
    assert len(ids_of(events)) == 8
    assert (await client.get(session)).session.open_turn_id == ""


@pytest.mark.parametrize("step", ["get_turn", "claim_turn", "list_turns"])
@pytest.mark.parametrize("wish", ["recover", "resume", "cancel"])
async def test_a_coordinator_that_stops_while_it_takes_a_turn_up_runs_it_no_more(
    new_cluster: Any, monkeypatch: pytest.MonkeyPatch, turns_of_idle_houses: list[Turns], wish: str, step: str
) -> None:
    """Whoever asks is told to come back: the turn stays open, and is the next one's to take up or to end."""
    cluster: Cluster = await new_cluster()
    session = await cluster.client().new_session()
    await eventually(lambda: bool(turns_of_idle_houses))  # it is up
    (turns,) = turns_of_idle_houses
    begin, real = SqliteRegistry.begin_turn, getattr(SqliteRegistry, step)

    async def commits_and_fails(self: SqliteRegistry, turn: object, *more: Any) -> None:
        await begin(self, turn, *more)
        raise RegistryUnavailable("the registry failed: disk I/O error")

    async def is_overtaken_by_stop(self: SqliteRegistry, *what: Any) -> Any:
        done = await real(self, *what)
        await turns.stop()
        return done

    monkeypatch.setattr(SqliteRegistry, "begin_turn", commits_and_fails)
    with pytest.raises(Exception, match="disk I/O error"):
        await all_of(cluster.client().generate(session, turn_id="t"))
    monkeypatch.setattr(SqliteRegistry, step, is_overtaken_by_stop)
    if wish == "recover":
        assert await turns.recover() == 0
    else:
        with pytest.raises(Stopping):
            await (turns.cancel(session, "t") if wish == "cancel" else anext(turns.events((session, "t"), 0)))
    assert turns.n_open == 0
    monkeypatch.undo()
    assert (await cluster.client().get(session)).session.open_turn_id == "t"


async def test_a_turn_given_up_after_a_restart_tells_its_end_to_who_had_more_of_it(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script(token_seconds=0.01))
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    events = client.generate(session, turn_id="t", max_tokens=60)
    first = await take_tokens(events, 20)
    worker.script.token_seconds = 0.2  # after the restart it takes a while to get that far again
    await cluster.restart()
    await events.aclose()
    resumed = client.resume(session, "t", from_index=len(first))
    waiting = asyncio.ensure_future(anext(resumed))
    await until(lambda: answered(client, session))
    await client.stub.CancelTurn(chat_pb2.CancelTurnRequest(session_id=session, turn_id="t"))
    await asyncio.gather(waiting, return_exceptions=True)
    end = (await resume_until_served(client, session, len(first)))[-1]
    assert end.HasField("finished")
    assert end.finished.n_answer_tokens < len(first)


async def answered(client: object, session: str) -> bool:
    """The turn runs again."""
    turns = (await client.get(session)).turns
    return turns[0].state == chat_pb2.TURN_STATE_RUNNING


async def test_a_registry_that_fails_for_a_while_is_logged_once_and_told_to_who_waits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    real = SqliteRegistry.finish_turn
    n_left = 4

    async def fails_at_first(self: SqliteRegistry, *arguments: object) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left >= 0:
            raise RegistryUnavailable("the registry failed: disk I/O error")
        await real(self, *arguments)

    monkeypatch.setattr(SqliteRegistry, "finish_turn", fails_at_first)
    caplog.set_level(logging.WARNING, logger="kvferry")
    events, error = await read_while_it_lasts(client.generate(session, turn_id="t"))
    assert error is not None
    assert (error.code(), code_of(error)) == (grpc.StatusCode.UNAVAILABLE, "registry_unavailable")
    rest = await resume_until_served(client, session, len(ids_of(events)))
    assert len(ids_of(events) + ids_of(rest)) == 8
    assert n_left < 0
    told = [record.getMessage() for record in caplog.records if "disk I/O error" in record.getMessage()]
    assert len(told) == 1
    assert "trying on: the registry failed: disk I/O error" in told[0]


class Leaves:
    """Makes a method wait, once it has had its effect or before, until the client that asked for it is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, *, effect_first: bool) -> None:
        real, self._begun, self._go_on = getattr(owner, method), asyncio.Event(), asyncio.Event()

        async def slow(*what: Any) -> Any:
            done = await real(*what) if effect_first else None
            self._begun.set()
            await self._go_on.wait()
            return done if effect_first else await real(*what)

        monkeypatch.setattr(owner, method, slow)

    async def amid(self, call: Coroutine[Any, Any, Any]) -> None:
        asking = asyncio.ensure_future(call)
        await self._begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.1)  # the coordinator hears that the client is gone
        self._go_on.set()


async def test_a_session_whose_client_leaves_while_it_is_deleted_is_forgotten_by_nodes_too(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await all_of(client.generate(session))
    await Leaves(monkeypatch, SqliteRegistry, "delete_session", effect_first=True).amid(client.delete(session))
    await eventually(lambda: session in worker.dropped)


async def test_a_fork_whose_client_leaves_while_it_is_made_is_made_and_leaves_no_part_of_itself(
    new_cluster: Callable[..., Any], etcd: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Cluster = await new_cluster(registry=f"{etcd.url}/{tmp_path.name}")
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    await all_of(client.generate(await client.new_session("s")))
    request = chat_pb2.ForkSessionRequest(session_id="s", new_session_id="fork")

    async def fork() -> None:
        await client.stub.ForkSession(request)

    await Leaves(monkeypatch, NewSessions, "_put", effect_first=False).amid(fork())

    async def is_made() -> bool:
        found = await client.stub.ListSessions(chat_pb2.ListSessionsRequest())
        return {session.session_id for session in found.sessions} == {"s", "fork"}

    await until(is_made)
    assert len((await client.get("fork")).turns) == 1


async def test_a_turn_that_is_cancelled_before_its_first_step_ends_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was placed as it became durable, and nobody had told the node."""
    worker = await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    start = Turns._start

    def start_and_cancel(self: Turns, runner: TurnRunner) -> None:
        start(self, runner)
        runner.cancel()

    monkeypatch.setattr(Turns, "_start", start_and_cancel)
    *_, last = await all_of(client.generate(session))
    assert last.finished.reason == common_pb2.FINISH_REASON_CANCELLED
    assert (await client.get(session)).session.open_turn_id == ""
    assert not worker.requests
