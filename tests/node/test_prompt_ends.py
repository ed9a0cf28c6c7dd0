"""A prompt whose rows and last logits are there needs no forward pass before its first token, and no bit differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.vision.placed import PlacedImage
from kvferry.engine.vision.positions import Grid
from kvferry.node.prompt_ends import PromptEnds, are_worth_saving
from kvferry.proto.v1 import common_pb2, worker_pb2

from .running_node import RunningNode, running_node

Prompts = dict[str, list[int]]
Own = Callable[[list[int]], list[int]]
Tokens = list[common_pb2.GeneratedToken]

SAMPLINGS = {
    "greedy": common_pb2.SamplingSettings(),
    "seeded": common_pb2.SamplingSettings(temperature=1.0, top_p=0.95, seed=7, repetition_penalty=1.2),
    "logprobs": common_pb2.SamplingSettings(temperature=0.7, seed=1, logprobs=True, top_logprobs=5),
}


def generate(
    node: RunningNode, prompt: list[int], session: str, sampling: str, **request: object
) -> tuple[int, Tokens]:
    """How many of the prompt's tokens were computed, and the answer with its log-probabilities."""
    call = node.start_turn(
        prompt, session=session, sampling=SAMPLINGS[sampling], **{"max_tokens": 8, "end_token_ids": []} | request
    )
    responses = list(call)
    tokens = [token for response in responses for token in response.tokens.tokens]
    return responses[0].prefix.n_computed, tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_drawn_again_is_that_of_a_node_that_computes_everything(
    node: RunningNode, stored: RunningNode, prompts: Prompts, own: Own, session: str, sampling: str
) -> None:
    prompt = own(prompts["multi"])
    expected = generate(node, prompt, session, sampling)
    assert expected[0] == len(prompt)
    assert generate(stored, prompt, session, "greedy")[0] == len(prompt)
    assert generate(stored, prompt, session, sampling) == (0, expected[1])  # by the same session: it drops its answer
    assert generate(stored, prompt, f"{session}-2", sampling) == (0, expected[1])


def test_another_node_needs_no_forward_pass_where_the_prompts_end_was_saved(
    tmp_path: Path,
    smollm2_path: Path,
    node: RunningNode,
    stored: RunningNode,
    store_of: Path,
    prompts: Prompts,
    own: Own,
    session: str,
) -> None:
    prompt = own(prompts["long"])
    flags = ("--store", str(store_of.parent), "--publish-every-tokens", "96", "--kv-memory", "256MiB")
    with running_node(tmp_path / "other", smollm2_path, *flags) as other:
        generate(other, prompt, session, "greedy", max_tokens=40)
        other.wait_for("load.snapshots_published == 2")  # the prompt with its logits, then the answer
    before = stored.status().load
    n_computed, first = generate(stored, prompt, session, "logprobs", max_tokens=1)
    after = stored.status().load
    assert (n_computed, len(first)) == (0, 1)
    assert (after.engine_steps, after.rows_prefilled) == (before.engine_steps, before.rows_prefilled)
    assert after.prompts_covered == before.prompts_covered + 1
    for sampling in SAMPLINGS:
        expected = generate(node, prompt, f"{session}-{sampling}", sampling)[1]
        node.drop_all()
        assert generate(stored, prompt, session, sampling) == (0, expected)


def test_a_prompt_that_goes_on_or_has_lost_a_row_is_computed_from_there(
    stored: RunningNode, store_of: Path, prompts: Prompts, own: Own, session: str
) -> None:
    prompt = own(prompts["multi"])
    generate(stored, prompt, session, "greedy", max_tokens=1)
    stored.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id=session), timeout=20)
    assert generate(stored, prompt[:-1], session, "greedy")[0] == 1
    assert generate(stored, [*prompt, 3], session, "greedy")[0] >= 1


def test_logits_are_forgotten_by_age_and_belong_to_the_whole_prompt() -> None:
    ends = PromptEnds(max_bytes=3 * 400)
    prompts = [np.arange(n, dtype=np.int32) for n in range(1, 5)]
    for number, prompt in enumerate(prompts[:3]):
        ends.remember(prompt, (), np.full(100, number, np.float32))
    assert ends.find(prompts[0], ()) is not None  # used: the second is the oldest now
    ends.remember(prompts[3], (), np.full(100, 3, np.float32))
    found = [ends.find(prompt, ()) for prompt in prompts]
    assert [None if logits is None else int(logits[0]) for logits in found] == [0, None, 2, 3]
    assert ends.find(prompts[3][::-1].copy(), ()) is None


def test_two_pictures_have_the_same_tokens_and_not_the_same_logits() -> None:
    ends, prompt = PromptEnds(), np.full(8, 5, np.int32)
    one, other = ((PlacedImage(2, 4, Grid(1, 4, 4), bytes([i]) * 32),) for i in range(2))
    ends.remember(prompt, one, np.zeros(10, np.float32))
    assert ends.find(prompt, one) is not None
    assert ends.find(prompt, other) is None
    assert ends.find(prompt, ()) is None


def test_logits_are_saved_beside_rows_of_many_times_their_bytes_only() -> None:
    logits = np.zeros(49_152, np.float32)
    assert are_worth_saving(logits, 60 * 46_080)  # 60 rows of float32, of the demo's model
    assert not are_worth_saving(logits, 60 * 12_240)  # of q8


def test_a_tenants_prompts_are_known_to_it_alone() -> None:
    ends, prompt = PromptEnds(), np.full(8, 5, np.int32)
    ends.remember(prompt, (), np.zeros(10, np.float32), "acme")
    assert ends.find(prompt, (), "acme") is not None
    assert ends.find(prompt, (), "bolt") is None
    assert ends.find(prompt, ()) is None
