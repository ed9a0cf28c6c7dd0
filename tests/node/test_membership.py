"""A real node and a FleetService that stands in for the coordinator."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from free_ports import free_port

from kvferry.node import membership
from kvferry.node.membership import Memberships
from kvferry.proto.v1 import fleet_pb2, worker_pb2

from .running_node import SABOTAGED, Answer, RunningNode, error_of, running_node
from .standin_coordinator import LEASE_SECONDS, StandInCoordinator

Prompts = dict[str, list[int]]
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def coordinator() -> Iterator[StandInCoordinator]:
    """A stand-in."""
    coordinator = StandInCoordinator()
    yield coordinator
    coordinator.stop()


@pytest.fixture(scope="module")
def shared_member(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, coordinator: StandInCoordinator
) -> Iterator[RunningNode]:
    """See `member`."""
    folder = tmp_path_factory.mktemp("member")
    flags = ("--coordinator", coordinator.address, "--store", str(folder / "store"), "--context", "2048")
    with running_node(folder, smollm2_path, *flags) as node:
        yield node


@pytest.fixture
def member(shared_member: RunningNode, coordinator: StandInCoordinator) -> RunningNode:
    """A node that is a member, with nothing in memory."""
    coordinator.generation += 10  # whatever an earlier test claimed, this is who is obeyed
    coordinator.silent = coordinator.forget = False
    n_beats = len(coordinator.heartbeats)
    coordinator.wait_for(f"registered and len(heartbeats) > {n_beats + 1}")
    if coordinator.lease_seconds != LEASE_SECONDS:
        coordinator.give_lease(LEASE_SECONDS)
    shared_member.generation = coordinator.generation
    shared_member.drop_all()
    return shared_member


def test_a_node_says_who_it_is_and_how_it_is(
    coordinator: StandInCoordinator, member: RunningNode, prompts: Prompts
) -> None:
    hello = coordinator.registered[0]
    status = member.status()
    assert (hello.node_id, hello.address) == (member.log_path.parent.name, member.address)
    assert hello.fingerprint == status.fingerprint
    assert (hello.vocabulary_size, hello.context_length, hello.max_running) == (49152, 2048, 8)
    assert hello.geometry == status.geometry
    assert len(hello.boot_id) >= 16
    assert hello.tokenizer_digest
    n_before = len(coordinator.heartbeats)
    n_drawn_before = status.load.tokens_generated
    member.run_turn(prompts["multi"], session="told", max_tokens=4, end_token_ids=[])
    coordinator.wait_for(f"any(beat.published for beat in heartbeats[{n_before}:])")
    published = [snapshot for beat in coordinator.heartbeats[n_before:] for snapshot in beat.published]
    assert [(s.n_tokens, s.fingerprint) for s in published] == [(len(prompts["multi"]) + 3, hello.fingerprint)]
    last = coordinator.heartbeats[-1]
    assert {s.session_id: s.n_tokens for s in last.resident} == {"told": len(prompts["multi"]) + 3}
    assert last.load.tokens_generated - n_drawn_before == 4
    assert last.boot_id == hello.boot_id
    n_beats = len(coordinator.heartbeats)
    coordinator.wait_for(f"len(heartbeats) > {n_beats + 2}")
    assert not coordinator.heartbeats[-1].published  # told once, since the answer came


def test_a_node_that_is_not_heard_stops_its_turns_and_keeps_their_rows(
    coordinator: StandInCoordinator, member: RunningNode, prompts: Prompts
) -> None:
    call = member.start_turn(prompts["chat_en"], max_tokens=1900, end_token_ids=[])
    answer = Answer()
    answer.take(next(call))
    coordinator.give_lease(1.0)
    coordinator.silent = True
    with pytest.raises(grpc.RpcError) as caught:
        answer.take_all(call)
    assert error_of(caught.value)[:2] == ("UNAVAILABLE", "lease_lost")
    with pytest.raises(grpc.RpcError) as caught:
        member.run_turn(prompts["chat_en"])
    assert error_of(caught.value)[:2] == ("UNAVAILABLE", "lease_lost")
    assert member.wait_for("load.n_running == 0").resident[0].n_tokens >= len(answer.tokens)
    coordinator.silent = False
    coordinator.give_lease(LEASE_SECONDS)
    assert member.run_turn(prompts["chat_en"], max_tokens=2).tokens == answer.tokens[:2]


def test_a_node_joins_again_when_it_is_asked_to(coordinator: StandInCoordinator, member: RunningNode) -> None:
    n_before = len(coordinator.registered)
    coordinator.forget = True
    coordinator.wait_for(f"len(registered) == {n_before + 1}")
    assert coordinator.registered[0].boot_id == coordinator.registered[-1].boot_id


def test_a_node_that_is_refused_says_so_once_and_why_and_not_that_nobody_is_there(
    coordinator: StandInCoordinator, member: RunningNode
) -> None:
    before, n_before = member.log, len(coordinator.registered)
    coordinator.refusal = "node id x is used by a process that started later: give each node its own --node-id"
    coordinator.forget = True
    deadline = time.monotonic() + 20
    while coordinator.refusal not in member.log:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)  # it tries again meanwhile
    told = member.log.removeprefix(before)
    assert told.count("trying on") == 1
    assert f"refuses this node, trying on: {coordinator.refusal}" in told
    coordinator.refusal = ""
    coordinator.wait_for(f"len(registered) == {n_before + 1}")
    coordinator.refusal = "another reason"  # told again after it was in between
    coordinator.forget = True
    while "another reason" not in member.log:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    coordinator.refusal = ""
    coordinator.wait_for(f"len(registered) == {n_before + 2}")


def test_a_node_serves_before_its_coordinator_is_there_and_finds_it(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts
) -> None:
    first = StandInCoordinator()
    first.stop()
    with running_node(tmp_path / "n", smollm2_path, "--coordinator", first.address) as node:
        assert len(node.run_turn(prompts["chat_en"], max_tokens=2).tokens) == 2
        late = StandInCoordinator(port=first.port)
        late.wait_for("registered and heartbeats")
        late.stop()
        restarted = StandInCoordinator(port=first.port, generation=2)
        restarted.forget = True
        restarted.wait_for("registered")
        restarted.stop()


def test_an_older_coordinator_is_not_obeyed(
    coordinator: StandInCoordinator, member: RunningNode, prompts: Prompts
) -> None:
    newer = coordinator.generation + 3
    coordinator.give_lease(2.0)
    member.run_turn(prompts["chat_en"][:4], max_tokens=1, coordinator_generation=newer)
    with pytest.raises(grpc.RpcError) as caught:
        member.run_turn(prompts["chat_en"], max_tokens=1, coordinator_generation=newer - 1)
    assert error_of(caught.value)[:2] == ("FAILED_PRECONDITION", "stale_coordinator")
    # the stand-in answers heartbeats with the generation that it had, which renews nothing: the lease ends
    call = member.start_turn(prompts["chat_en"], max_tokens=1900, end_token_ids=[], coordinator_generation=newer)
    with pytest.raises(grpc.RpcError) as caught:
        Answer().take_all(call)
    assert error_of(caught.value)[1] == "lease_lost"


@pytest.fixture
def leaver(tmp_path: Path, smollm2_path: Path) -> Iterator[tuple[StandInCoordinator, RunningNode]]:
    """A coordinator and a member that may be drained."""
    coordinator = StandInCoordinator()
    flags = ("--coordinator", coordinator.address, "--store", str(tmp_path / "store"), "--context", "2048")
    with running_node(tmp_path / "leaver", smollm2_path, *flags) as node:
        coordinator.wait_for("registered")
        node.generation = coordinator.generation
        yield coordinator, node
    coordinator.stop()


def test_a_drained_node_lets_go_of_everything(
    tmp_path: Path, smollm2_path: Path, leaver: tuple[StandInCoordinator, RunningNode], prompts: Prompts
) -> None:
    coordinator, member = leaver
    member.run_turn(prompts["multi"], session="idle", max_tokens=2)
    call = member.start_turn(prompts["chat_en"], session="running", max_tokens=1900, end_token_ids=[])
    answer = Answer()
    answer.take(next(call))
    drained = member.stub.Drain(worker_pb2.DrainRequest(timeout_seconds=20), timeout=30)
    assert (drained.n_sessions_saved, drained.n_turns_moved) == (2, 1)
    with pytest.raises(grpc.RpcError) as caught:
        answer.take_all(call)
    assert error_of(caught.value)[:2] == ("UNAVAILABLE", "draining")
    assert answer.indexes == list(range(len(answer.tokens)))
    with pytest.raises(grpc.RpcError) as caught:
        member.run_turn(prompts["chat_en"])
    assert error_of(caught.value)[:2] == ("UNAVAILABLE", "draining")
    assert len(coordinator.deregistered) == 1
    assert member.status().draining
    following = prompts["chat_en"] + answer.tokens
    with running_node(tmp_path / "other", smollm2_path, "--store", str(tmp_path / "store")) as other:
        moved = other.run_turn(
            following,
            session="running",
            n_prompt_tokens=len(prompts["chat_en"]),
            max_tokens=len(answer.tokens) + 4,
            end_token_ids=[],
        )
        assert moved.sources == (0, len(following) - 1, 1)  # every row came from the store
    assert member.stop() == 0


def test_a_node_that_leaves_while_it_is_let_in_says_so(leaver: tuple[StandInCoordinator, RunningNode]) -> None:
    """Or turns are sent to it until its lease ends."""
    coordinator, node = leaver
    coordinator.answer_seconds = 0.7
    coordinator.forget = True
    coordinator.wait_for("len(registered) == 2")
    node.stub.Drain(worker_pb2.DrainRequest(timeout_seconds=20), timeout=30)
    coordinator.wait_for("len(deregistered) == 1")
    assert coordinator.deregistered[0].boot_id == coordinator.registered[1].boot_id


class AllTogether(StandInCoordinator):
    """Answers a good-bye once others have got theirs."""

    everybody = threading.Barrier(3)

    def Deregister(self, request: fleet_pb2.DeregisterRequest, context: Any) -> fleet_pb2.DeregisterResponse:  # noqa: N802 - the wire
        """As it says."""
        self.everybody.wait(PATIENCE_S)
        return super().Deregister(request, context)


def members_of(*coordinators: str) -> Memberships:
    """A node that has asked to be let in everywhere."""
    identity = SimpleNamespace(boot_id="boot")
    state: Any = SimpleNamespace(
        config=SimpleNamespace(node_id="n", coordinators=coordinators), ready=lambda: SimpleNamespace(identity=identity)
    )
    memberships = Memberships(state, "127.0.0.1:1")
    for each in memberships._memberships:
        each._asked_to_join = True
    return memberships


async def test_all_coordinators_are_taken_leave_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "DEREGISTER_TIMEOUT_SECONDS", PATIENCE_S)
    coordinators = [AllTogether() for _ in range(3)]
    await members_of(*(each.address for each in coordinators)).leave()
    assert [[said.boot_id for said in each.deregistered] for each in coordinators] == 3 * [["boot"]]
    for each in coordinators:
        each.stop()


async def test_coordinators_that_are_away_hold_up_no_end_and_no_other_good_bye(
    coordinator: StandInCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One does not listen, one does not answer; each is given its time and no more."""
    monkeypatch.setattr(membership, "DEREGISTER_TIMEOUT_SECONDS", 1.0)
    n_before = len(coordinator.deregistered)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        away = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{frozen.getsockname()[1]}")
        async with asyncio.timeout(PATIENCE_S):
            await members_of(*away, coordinator.address).leave()
    assert len(coordinator.deregistered) == n_before + 1


def test_a_long_drain_does_not_hold_up_the_end(tmp_path: Path, smollm2_path: Path, prompts: Prompts) -> None:
    flags = ("--store", str(tmp_path / "store"), "--drain-timeout-seconds", "1")
    with running_node(tmp_path / "n", smollm2_path, *flags, program=SABOTAGED) as node:
        node.orders.write_text("publish")
        node.run_turn(prompts["chat_en"], max_tokens=1)
        drain = node.stub.Drain.future(worker_pb2.DrainRequest(timeout_seconds=600), timeout=600)
        node.wait_for("status.draining")
        assert node.stop(seconds=30) == 0
        with pytest.raises(grpc.RpcError):
            drain.result(10)
