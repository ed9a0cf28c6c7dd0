"""The coordinator, or everything, is killed: the client goes on by itself, and the conversation is as it was."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.client.sdk import Client, ConnectionLost
from kvferry.drills.cluster import LocalCluster
from kvferry.drills.conversation import hold_turn
from kvferry.drills.demo import conversation

from .rig import options, placed_on, question
from .tripped import Tripped

pytestmark = pytest.mark.alone  # a cluster of three nodes, and what it does within a lease


@pytest.mark.parametrize(("number", "after_token"), [(0, 0), (0, 20), (1, 1), (1, 63)])
def test_killed_in_an_answer_the_client_resumes_the_same_stream(nodes, cluster, control, number, after_token):
    def restart(_node_id: str) -> None:
        cluster.kill_coordinator()
        meanwhile.submit(cluster.start_coordinator)  # the client meets a closed port first

    turn, strike = question(number), nodes.strike(after_token, restart)
    with ThreadPoolExecutor(1) as meanwhile, Client(cluster.address) as client:
        session = client.create_session()
        log = hold_turn(session, turn, strike)
        control.assert_same([turn], [log.record], session)
    assert strike.done
    assert any(isinstance(event, ConnectionLost) for _, event in log.events)
    cluster.ensure_all_live()


def test_an_answer_goes_on_while_nobody_is_connected(cluster, control):
    turn = question(2)
    with Client(cluster.address) as client:
        session = client.create_session()
        with session.generate(turn.text, max_tokens=turn.max_tokens, sampling=turn.sampling) as stream:
            next(stream)
        cluster.kill_coordinator()
        cluster.start_coordinator()
        record = session.resume(stream.turn_id).collect()
    truth = control.answer(turn)
    assert record.token_ids == tuple(token.token_id for token in truth.received)
    assert record.text == truth.text
    cluster.ensure_all_live()


def test_after_a_power_cut_the_conversation_goes_on_from_the_store(model, control, tmp_path):
    turns = conversation(seed=5)
    with LocalCluster(options(model, tmp_path, n_nodes=2)) as cluster:
        with Client(cluster.address) as client:
            session = client.create_session("before")
            records = [hold_turn(session, turn).record for turn in turns[:2]]
            for _ in range(1000):
                if client.status().n_snapshots >= 2:
                    break
                threading.Event().wait(0.02)
        cluster.kill_all()
        cluster.ensure_all_live()
        with Client(cluster.address) as client:
            session = client.session("before")
            log = hold_turn(session, turns[2])
            control.assert_same(turns, [*records, log.record], session)
    prefix = log.placements[0].prefix
    assert prefix.n_resident == 0
    assert prefix.n_restored > 700


def test_a_power_cut_in_an_answer_loses_nothing(model, control, tmp_path):
    turn = question(3)
    nodes = Tripped(options(model, tmp_path, n_nodes=2))
    with nodes.cluster as cluster, ThreadPoolExecutor(1) as meanwhile, Client(cluster.address) as client:

        def cut(_node_id: str) -> None:
            cluster.kill_all()
            meanwhile.submit(cluster.ensure_all_live)

        session = client.create_session()
        log = hold_turn(session, turn, nodes.strike(17, cut))
        control.assert_same([turn], [log.record], session)
    assert len(placed_on(log)) >= 2
