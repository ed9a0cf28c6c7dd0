"""A session on each kind of model outlives the node that answers it, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from kvferry.client.sdk import Client, Sampling
from kvferry.drills.cluster import LocalCluster
from kvferry.drills.conversation import TurnRequest, hold_turn

from .pictures import picture
from .rig import Control, Strike, options, placed_on

N_TOKENS = 700  # a model this small answers faster than a signal arrives
N_TRIES = 5


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
    folder = chat_model(name)
    quantised = {"node_arguments": ("--quant", quant)}
    settings = options(str(folder), tmp_path / "cluster", n_nodes=2, kv_memory="64MiB", context=1024, **quantised)
    with LocalCluster(settings) as cluster, Client(cluster.address) as client:
        control = Control(cluster)
        asked = (
            TurnRequest(
                f"Tell me a story, {i}.",
                N_TOKENS,
                Sampling(temperature=0.8, seed=i),
                images=(picture(i), picture(-i % 7, 64, 128)) if sees else (),
            )
            for i in range(40)
        )
        whole = (turn for turn in asked if len(control.answer(turn).received) == N_TOKENS)
        for turn in islice(whole, N_TRIES):
            strike = Strike(3, cluster.kill_node)
            session = client.create_session()
            log = hold_turn(session, turn, strike)
            assert strike.done
            control.assert_same([turn], [log.record], session)
            if len(set(placed_on(log))) == 2:
                return
            cluster.ensure_all_live()  # all tokens were on their way before the node died
    pytest.fail(f"the node was never killed before the end of an answer, in {N_TRIES} tries")
