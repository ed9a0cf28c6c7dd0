"""A session on each kind of model outlives the node that answers it, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.client.sdk import Client, Sampling
from kvferry.drills.conversation import TurnRequest, hold_turn

from .pair import tripped_pair
from .pictures import picture
from .rig import ANSWER_TOKENS, placed_on


@pytest.mark.parametrize(
    ("name", "quant", "sees"),
    [
        ("llama_tied_bf16", "q8", False),
        ("qwen2_bias_f32", "q8", False),
        ("qwen3_tied_bf16", "q4", False),
        ("qwen3moe_mixed_f32", "q8", False),
        ("qwen3vl_tied_bf16", "q8", True),
        ("qwen3vlmoe_bf16", "q8", True),
    ],
)
def test_killed_mid_answer_nothing_is_lost_twice_or_different(
    name: str, quant: str, sees: bool, chat_model: Callable[[str], Path], tmp_path: Path
) -> None:
    nodes = tripped_pair(chat_model(name), tmp_path / "cluster", node_arguments=("--quant", quant))
    with nodes.cluster as cluster, Client(cluster.address) as client:
        asked = (
            TurnRequest(
                f"Tell me a story, {i}.",
                ANSWER_TOKENS,
                Sampling(temperature=0.8, seed=i),
                images=(picture(i), picture(-i % 7, 64, 128)) if sees else (),
            )
            for i in range(40)
        )
        turn = next(turn for turn in asked if len(nodes.control.answer(turn).received) == ANSWER_TOKENS)
        session = client.create_session()
        log = hold_turn(session, turn, nodes.strike(3, cluster.kill_node))
        nodes.control.assert_same([turn], [log.record], session)
        assert len(set(placed_on(log))) == 2
