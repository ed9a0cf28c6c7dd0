"""What the system tests share: conversations, the undisturbed control, and ways to strike."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from kvferry.client.sdk import Client, Placed, Sampling, Session, Token, TurnEvent
from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.conversation import TurnLog, TurnRequest, hold_turn
from kvferry.drills.judge import AnswerRecord, judge

ANSWER_TOKENS = 64

SUBJECTS = (
    *("a ferry", "a lighthouse", "a clockmaker", "a beehive", "a mountain hut", "a night train", "an old bridge"),
    *("a bakery", "a violin", "a storm at sea", "a school in the hills", "a market", "a river", "a library"),
)


def options(model: str, directory: Path, **changes: Any) -> ClusterOptions:
    """Small nodes, one thread each."""
    return ClusterOptions(**({"model": model, "directory": directory, "kv_memory": "256MiB"} | changes))


def question(number: int, max_tokens: int = ANSWER_TOKENS) -> TurnRequest:
    """A question with a long answer; even numbers are answered greedily, odd ones at temperature 0.8 with a seed."""
    text = f"Write a long story about {SUBJECTS[number % len(SUBJECTS)]}, chapter {number + 1}. Take your time."
    return TurnRequest(text, max_tokens, Sampling(temperature=0.8, seed=number) if number % 2 else Sampling())


class Control:
    """Answers questions undisturbed, each conversation once."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._answers: dict[tuple[TurnRequest, ...], tuple[list[AnswerRecord], tuple[int, ...]]] = {}

    def conversation(self, turns: Sequence[TurnRequest]) -> tuple[list[AnswerRecord], tuple[int, ...]]:
        """The answers, and all tokens of the session."""
        key = tuple(turns)
        if key not in self._answers:
            with Client(self._cluster.address) as client:
                session = client.create_session()
                records = [hold_turn(session, turn).record for turn in turns]
                self._answers[key] = (records, session.details().token_ids)
        return self._answers[key]

    def answer(self, turn: TurnRequest) -> AnswerRecord:
        """Of a conversation of one turn."""
        return self.conversation([turn])[0][0]

    def assert_same(self, turns: Sequence[TurnRequest], records: Sequence[AnswerRecord], session: Session) -> None:
        """No token lost, duplicated or differing, in what the client saw and in what the coordinator keeps."""
        truth, token_ids = self.conversation(turns)
        verdict = judge(records, truth, session.details().token_ids, token_ids)
        assert verdict.is_good, [finding.sentence for finding in verdict.findings]
        assert len(truth) == len(turns)


@dataclasses.dataclass
class Strike:
    """Does `act(node_id)` once, when `after_token` tokens of a turn have arrived (0: as soon as a node has it)."""

    after_token: int
    act: Callable[[str], None]
    node_id: str = ""
    done: bool = False

    def __call__(self, _log: TurnLog, event: TurnEvent) -> None:
        self.hear(event)

    def hear(self, event: TurnEvent) -> None:
        """The next event of the turn."""
        if isinstance(event, Placed) and not self.done:
            self.node_id = event.node_id
        arrived = event.sequence + 1 if isinstance(event, Token) else 0
        if not self.done and self.node_id and arrived >= self.after_token:
            self.done = True
            self.act(self.node_id)


def placed_on(log: TurnLog) -> list[str]:
    """The nodes that had the turn, in order."""
    return [placed.node_id for placed in log.placements]


def kill_points(seed: int, n_points: int, answer_length: Callable[[int], int]) -> list[tuple[int, int]]:
    """(question, kill after this many tokens): random places in answers of 64 tokens, half of them greedy."""
    rng = random.Random(seed)
    n_each = (n_points + 1) // 2
    greedy, sampled = (
        list(islice((n for n in range(kind, 4 * len(SUBJECTS), 2) if answer_length(n) == ANSWER_TOKENS), n_each))
        for kind in (0, 1)
    )
    numbers = [(greedy, sampled)[i % 2][i // 2 % min(len(greedy), len(sampled))] for i in range(n_points)]
    return [(number, rng.randrange(0, ANSWER_TOKENS)) for number in numbers]
