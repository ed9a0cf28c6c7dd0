"""A node that proposes tokens gives the answers of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.node.config import NodeConfig
from kvferry.node.errors import ConfigInvalid
from kvferry.proto.v1 import common_pb2

from .running_node import RunningNode, running_node

PHRASE = [504, 3890, 28, 1172, 913, 7, 42, 4095, 77]
WARM = common_pb2.SamplingSettings(temperature=0.8, seed=3, logprobs=True)


@pytest.mark.parametrize("flags", [["--speculate", "ngram"], ["--speculate", "draft"]], ids=["ngram", "draft"])
def test_the_answers_are_those_of_plain_decoding_and_the_status_tells_what_was_right(
    node: RunningNode, session: str, tmp_path: Path, smollm2_path: Path, flags: list[str]
) -> None:
    draft = ["--draft-model", str(smollm2_path)] if "draft" in flags else []
    with running_node(tmp_path / "guessing", smollm2_path, *flags, *draft, "--context", "2048") as guessing:
        for sampling in (None, WARM):
            asked = {"session": session, "max_tokens": 80, "sampling": sampling, "end_token_ids": []}
            node.drop(session)
            plain, guessed = node.run_turn(PHRASE * 6, **asked), guessing.run_turn(PHRASE * 6, **asked)
            assert (guessed.tokens, guessed.indexes, guessed.reason) == (plain.tokens, plain.indexes, plain.reason)
        load = guessing.status().load
        assert 20 < load.tokens_accepted <= load.tokens_proposed
        assert load.engine_steps < 120
        assert node.status().load.tokens_proposed == 0
        assert guessing.stop() == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"speculate": "draft"}, "draft_model is missing: speculate draft needs one"),
        ({"speculate": "ngram", "draft_model": "x"}, "draft-model is only of use with speculate draft"),
    ],
)
def test_a_draft_model_belongs_to_speculation_by_draft(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        NodeConfig.load({"model": "m", **flags})
