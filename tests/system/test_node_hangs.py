"""A node that is alive but silent, or there are none at all."""

from __future__ import annotations

import pytest

from kvferry.client.errors import NoNode
from kvferry.client.sdk import Client, NodeState
from kvferry.drills.cluster import LocalCluster
from kvferry.drills.conversation import hold_turn

from .rig import options, placed_on, question
from .tripped import Tripped

pytestmark = pytest.mark.alone  # a cluster of three nodes, and what it does within a lease


def test_a_frozen_node_loses_the_stream_and_harms_nothing_when_it_thaws(model, control, tmp_path):
    turns = [question(4), question(5)]
    nodes = Tripped(options(model, tmp_path, lease_s=1.0))
    with nodes.cluster as cluster, Client(cluster.address) as client:
        session = client.create_session()
        strike = nodes.strike(15, cluster.freeze_node)
        first = hold_turn(session, turns[0], strike)
        assert placed_on(first)[0] == strike.node_id
        assert placed_on(first)[-1] != strike.node_id
        cluster.thaw_node(strike.node_id)
        second = hold_turn(session, turns[1])
        cluster.wait_live(cluster.nodes)  # the zombie has joined again
        third = hold_turn(session, question(6))
        control.assert_same([*turns, question(6)], [first.record, second.record, third.record], session)


def test_with_no_node_left_a_client_is_told_when_to_ask_again_and_the_turn_is_kept(model, control, tmp_path):
    turn = question(7)
    nodes = Tripped(options(model, tmp_path, n_nodes=1))
    with (
        nodes.cluster as cluster,
        Client(cluster.address, patience_s=0) as impatient,
        Client(cluster.address) as patient,
    ):
        session = impatient.create_session()
        strike = nodes.strike(20, cluster.kill_node)
        with pytest.raises(NoNode, match="no node") as caught:
            hold_turn(session, turn, strike, turn_id="kept")
        assert caught.value.retry_after_s is not None
        assert patient.nodes()[0].state in {NodeState.SUSPECT, NodeState.DEAD}
        assert patient.session(session.id).details().session.open_turn_id == "kept"
        cluster.start_nodes(["node-1"])
        answer = patient.session(session.id).resume("kept").collect()
        assert answer.token_ids == tuple(token.token_id for token in control.answer(turn).received)
        assert answer.text == control.answer(turn).text


def test_a_patient_client_just_waits_for_a_node(model, control, tmp_path):
    turn = question(8)
    with LocalCluster(options(model, tmp_path, n_nodes=1)) as cluster, Client(cluster.address) as client:
        cluster.kill_node("node-1")
        cluster.nodes["node-1"].start()  # compiles and loads while the turn waits
        session = client.create_session()
        log = hold_turn(session, turn)
        control.assert_same([turn], [log.record], session)
