"""A node is killed at every token of eight answers at once: nothing lost, doubled or different (promises 13 and 14)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvferry.client.sdk import Client

from .pair import Choir, tripped_pair, whole_questions
from .rig import ANSWER_TOKENS

pytestmark = pytest.mark.alone  # a cluster of three nodes, and what it does within a lease

N_SESSIONS = 8


@pytest.mark.parametrize(
    "kill_at",
    [
        pytest.param((0, 1, 17, 32, 48, 63), id="six"),
        pytest.param(range(ANSWER_TOKENS), id="every", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_killed_at_this_token_of_eight_answers_the_other_node_goes_on(
    kill_at: Iterable[int], chat_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Half of the sessions are greedy, half are drawn with a seed; the dead node alternates."""
    rig = tripped_pair(chat_model("qwen3_untied_f32"), tmp_path / "cluster")
    moved: Counter[int] = Counter()
    with rig.cluster as cluster, Client(cluster.address) as client:
        turns = whole_questions(rig.control, N_SESSIONS)
        doomed, other = cluster.nodes
        rig.stop(other)
        for index in kill_at:
            rig.order(doomed, round=index, gather=N_SESSIONS, stop_at=index, then="wait")
            choir = Choir(client, turns)
            rig.order(other)
            cluster.start_nodes([other])
            cluster.wait_live(cluster.nodes)
            choir.wait_for_tokens(index)
            assert choir.arrived == [index] * N_SESSIONS
            rig.order(doomed, round=index, stop_at=index, then="die")
            logs = choir.end()
            choir.assert_undisturbed(rig.control, logs)
            for log in logs:
                assert [(placed.node_id, placed.first_index) for placed in log.placements] == [
                    (doomed, 0),
                    (other, index),
                ]
                moved[index] += 1
            cluster.nodes[doomed].wait_gone(10)
            doomed, other = other, doomed
    assert moved == dict.fromkeys(kill_at, N_SESSIONS)
