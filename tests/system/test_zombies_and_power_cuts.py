"""Nodes that wake after their turns went elsewhere, a coordinator that should be gone, and a power cut with many
conversations open (promises 16 and 17)."""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.client.errors import ClientError, NoNode
from kvferry.client.sdk import Client, NodeState, Sampling, Session
from kvferry.drills.conversation import TurnRequest, hold_turn

from .pair import Choir, tripped_pair, whole_questions
from .tripped import Tripped

pytestmark = pytest.mark.alone  # a cluster of three nodes, and what it does within a lease

N_SESSIONS = 10
BLOCK = 32


def slow(cases: int) -> object:
    return pytest.param(cases, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.fixture(scope="module")
def rig(chat_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tripped]:
    rig = tripped_pair(chat_model("qwen3_untied_f32"), tmp_path_factory.mktemp("zombies"), lease_s=1.0)
    with rig.cluster:
        yield rig


def wait_until(rig: Tripped, client: Client, node_id: str, *states: NodeState) -> None:
    deadline = time.monotonic() + 20
    while next(node.state for node in client.nodes() if node.node_id == node_id) not in states:
        assert time.monotonic() < deadline, rig.cluster.log_of("coordinator")
        time.sleep(0.02)


def files_of(store: Path) -> dict[Path, tuple[int, bytes]]:
    """Every published file: which one it is, and what is in it. (Whoever reads one touches it, for the eviction.)"""
    return {path: (path.stat().st_ino, hashlib.sha256(path.read_bytes()).digest()) for path in store.rglob("kv*.kv")}


@pytest.mark.parametrize("n_rounds", [3, slow(30)])
def test_17_a_node_that_thaws_after_its_turns_moved_delivers_and_replaces_nothing(rig: Tripped, n_rounds: int) -> None:
    cluster, rng = rig.cluster, random.Random(17)
    zombie, other = cluster.nodes
    with Client(cluster.address) as client:
        turns = whole_questions(rig.control, N_SESSIONS)
        for number in range(n_rounds):
            cluster.freeze_node(other)
            wait_until(rig, client, other, NodeState.SUSPECT, NodeState.DEAD)
            for node_id in cluster.nodes:
                rig.order(node_id, round=number, pace=0.015)
            choir = Choir(client, turns)
            choir.wait_until_placed(zombie)
            cluster.thaw_node(other)
            cluster.wait_live(cluster.nodes)
            choir.wait_for_tokens(rng.randrange(1, 20))
            cluster.freeze_node(zombie)
            choir.wait_until_placed(other)
            before = files_of(cluster.directory / "store")
            cluster.thaw_node(zombie)
            logs = choir.end()
            choir.assert_undisturbed(rig.control, logs)
            # a machine in other hands for a lease moves a turn once more
            assert all([placed.node_id for placed in log.placements[:2]] == [zombie, other] for log in logs)
            cluster.wait_live(cluster.nodes)  # it has found its way back
            after = files_of(cluster.directory / "store")
            assert {path: after.get(path) for path in before} == before
    for node_id in cluster.nodes:
        rig.order(node_id)


def test_17_a_coordinator_with_an_old_log_is_refused_by_every_node(rig: Tripped) -> None:
    cluster = rig.cluster
    state, right, old = (cluster.directory / name for name in ("state", "right", "old"))
    cluster.coordinator.stop()
    shutil.copytree(state, old)
    for _ in range(2):
        cluster.start_coordinator()
        cluster.wait_live(cluster.nodes)
        cluster.coordinator.stop()
    state.rename(right)
    old.rename(state)
    cluster.start_coordinator()
    with Client(cluster.address, patience_s=0) as client, ThreadPoolExecutor(20) as pool:
        sessions = [client.create_session() for _ in range(20)]
        assert list(pool.map(error_of_a_turn, sessions)) == [NoNode] * 20
        assert [session.details().turns[0].n_answer_tokens for session in sessions] == [0] * 20
    assert all("was replaced by" in cluster.log_of(node_id) for node_id in cluster.nodes)
    cluster.coordinator.stop()
    shutil.rmtree(state)
    right.rename(state)
    cluster.ensure_all_live()


def error_of_a_turn(session: Session) -> type[Exception] | None:
    """How the session's next turn fails."""
    try:
        with session.generate("Hi", max_tokens=8) as stream:
            stream.collect()
    except ClientError as e:
        return type(e)
    return None


@pytest.mark.parametrize("n_sessions", [10, slow(100)])
def test_16_a_power_cut_in_many_answers_keeps_every_session(rig: Tripped, n_sessions: int) -> None:
    """Every process is killed at a random moment; what was saved is restored, and only the rest computed again."""
    cluster, rng = rig.cluster, random.Random(16)
    firsts = [TurnRequest(f"Tell {number:03d}.", 40, Sampling(seed=number)) for number in range(n_sessions)]
    seconds = [
        TurnRequest(f"Go on, {number:03d}.", 40, Sampling(temperature=0.8, seed=number)) for number in range(n_sessions)
    ]
    with ThreadPoolExecutor(1) as meanwhile, Client(cluster.address, patience_s=120) as client:
        sessions = [client.create_session() for _ in firsts]
        logs = [[hold_turn(session, turn)] for session, turn in zip(sessions, firsts, strict=True)]
        n_saved = [len(session.details().token_ids) - 1 for session in sessions]
        wait_for_saves(rig)
        for node_id in cluster.nodes:
            rig.order(node_id, round=n_sessions, pace=0.02)
        choir = Choir(client, seconds, sessions)
        choir.wait_for_tokens(rng.randrange(1, 30), n_sessions=1)
        cluster.kill_all()
        assert any(0 < n < 40 for n in choir.arrived)
        meanwhile.submit(cluster.ensure_all_live)
        for earlier, log in zip(logs, choir.end(), strict=True):
            earlier.append(log)
        n_rather_computed = 0
        for number, session in enumerate(sessions):
            rig.control.assert_same([firsts[number], seconds[number]], [log.record for log in logs[number]], session)
            placed = logs[number][1].placements[-1]
            assert placed.prefix is not None
            if placed.prefix.n_computed > BLOCK + placed.prefix.n_tokens - n_saved[number]:
                assert next(c for c in placed.candidates if c.chosen).reason.endswith(
                    "sooner than reading them from the store"
                )
                n_rather_computed += 1
    assert n_rather_computed < n_sessions / 2  # a tiny model computes faster than most disks read
    for node_id in cluster.nodes:
        rig.order(node_id)


def wait_for_saves(rig: Tripped) -> None:
    """Until nothing new has been published for a while."""
    before: dict[Path, tuple[int, bytes]] = {}
    for _ in range(100):
        time.sleep(0.3)
        now = files_of(rig.cluster.directory / "store")
        if now and now == before:
            return
        before = now
    raise AssertionError("the nodes never stop saving")
