"""The board that answers loses its power: the same stream goes on elsewhere, bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.client.sdk import Client, Sampling
from kvferry.drills.cluster import LocalCluster
from kvferry.drills.conversation import TurnRequest, hold_turn
from kvferry.drills.demo import conversation
from kvferry.drills.judge import AnswerRecord

from .rig import Strike, kill_points, options, placed_on, question

pytestmark = pytest.mark.alone  # a cluster of three nodes, and what it does within a lease


def kill_at_random_tokens(nodes, control, seed: int, n_kills: int) -> None:
    def answer_length(number: int) -> int:
        return len(control.answer(question(number)).received)

    cluster = nodes.cluster
    with Client(cluster.address) as client:
        for number, after_token in kill_points(seed, n_kills, answer_length):
            turn, strike = question(number), nodes.strike(after_token, cluster.kill_node)
            session = client.create_session()
            log = hold_turn(session, turn, strike)
            assert strike.done, (number, after_token)
            control.assert_same([turn], [log.record], session)
            assert len(set(placed_on(log))) == 2, (number, after_token)
            cluster.ensure_all_live()


def test_killed_at_four_random_tokens_nothing_is_lost_twice_or_different(nodes, control):
    kill_at_random_tokens(nodes, control, seed=12, n_kills=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_fifty_random_tokens_nothing_is_lost_twice_or_different(nodes, control):
    kill_at_random_tokens(nodes, control, seed=50, n_kills=50)


def test_killed_twice_in_one_answer(nodes, cluster, control):
    cluster.ensure_all_live()
    turn = question(0)

    def kill_one(node_id):
        cluster.kill_node(node_id)
        nodes.hold(40)

    def kill_another(node_id):
        cluster.kill_node(node_id)
        nodes.let_go()

    nodes.hold(8)
    first, second = Strike(8, kill_one), Strike(40, kill_another)

    def strike(log, event):
        first(log, event)
        second(log, event)

    with Client(cluster.address) as client:
        session = client.create_session()
        log = hold_turn(session, turn, strike)
        control.assert_same([turn], [log.record], session)
    assert len(set(placed_on(log))) == 3
    cluster.ensure_all_live()


def test_the_other_node_restores_what_the_dead_one_had_published(nodes, cluster, control):
    cluster.ensure_all_live()
    turns = conversation(seed=3)[:2]
    with Client(cluster.address) as client:
        session = client.create_session()
        n_snapshots = client.status().n_snapshots
        first = hold_turn(session, turns[0])
        wait_for_more_snapshots(client, n_snapshots)
        second = hold_turn(session, turns[1], nodes.strike(10, cluster.kill_node))
        control.assert_same(turns, [first.record, second.record], session)
    before, after = second.placements[0].prefix, second.placements[-1].prefix
    assert before.n_resident > 600
    assert after.n_restored > 600
    assert after.n_computed < 150
    cluster.ensure_all_live()


@pytest.mark.parametrize("n_kills", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_again_and_again_right_after_a_turn_while_it_publishes(model, control, tmp_path, n_kills):
    """Whatever the kill leaves in the store, the conversation goes on with the same tokens, and no file is torn."""
    text = conversation(seed=0)[0].text
    turns = [TurnRequest(text if i == 0 else f"And then? ({i})", 12, Sampling()) for i in range(n_kills)]
    rng = random.Random(10)
    with LocalCluster(options(model, tmp_path, n_nodes=2)) as cluster, Client(cluster.address) as client:
        session = client.create_session()
        records: list[AnswerRecord] = []
        for turn in turns:
            log = hold_turn(session, turn)
            records.append(log.record)
            time.sleep(rng.uniform(0, 0.12))
            cluster.kill_node(placed_on(log)[-1])
            check_every_file(tmp_path / "store")
            cluster.ensure_all_live()
        control.assert_same(turns, records, session)
    assert not list((tmp_path / "store").rglob("*.tmp"))


def wait_for_more_snapshots(client: Client, n_before: int) -> None:
    for _ in range(1000):
        if client.status().n_snapshots > n_before:
            return
        time.sleep(0.02)
    raise AssertionError("nothing was published within twenty seconds")


def check_every_file(store: Path) -> None:
    """Every byte of every file with a final name, read by another process."""
    command = [sys.executable, "-m", "kvferry.client.cli", "kv", "fsck", str(store)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
