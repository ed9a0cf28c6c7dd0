"""People who talk to a fleet while something is done to it: crowd.py HOST:PORT N_PEOPLE, until its input ends.

Asks each question once undisturbed and says `ready`; then all talk at once. At the end it says in JSON what it found.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))  # talking.py

from talking import Load

from kvferry.client.sdk import Client, Sampling, Session
from kvferry.drills.conversation import TurnRequest, hold_turn
from kvferry.drills.judge import AnswerRecord, Fault, judge

N_TOKENS: Final = 40
CONVERSATIONS: Final = (
    (TurnRequest("Tell me a long story about a ferry between four islands.", N_TOKENS),
     TurnRequest("And what became of its captain?", N_TOKENS)),
    (TurnRequest("Describe a market on a rainy day.", N_TOKENS, Sampling(temperature=0.8, seed=3)),),
    (TurnRequest("Write about a lighthouse and its keeper.", N_TOKENS),),
    (TurnRequest("Invent a new kind of bread.", N_TOKENS, Sampling(temperature=0.8, seed=5)),
     TurnRequest("How would a child describe it?", N_TOKENS)),
)  # fmt: skip


class Undisturbed:
    """The answers of a fleet that nothing is done to, and what differed from them."""

    def __init__(self, address: str) -> None:
        self._truth: dict[Sequence[TurnRequest], tuple[list[AnswerRecord], tuple[int, ...]]] = {}
        self.faults = dict.fromkeys(Fault, 0)
        self.sentences: list[str] = []
        self.n_tokens = 0
        with Client(address, tls_dir=os.environ.get("KVFERRY_TLS_DIR")) as client:
            for turns in CONVERSATIONS:
                session = client.create_session()
                records = [hold_turn(session, turn).record for turn in turns]
                self._truth[turns] = records, session.details().token_ids

    def assert_same(self, turns: Sequence[TurnRequest], records: Sequence[AnswerRecord], session: Session) -> None:
        """Counts; see `Truth`."""
        truth, token_ids = self._truth[turns]
        verdict = judge(records, truth, session.details().token_ids, token_ids)
        self.n_tokens += verdict.n_tokens_compared
        self.sentences += [finding.sentence for finding in verdict.findings]
        for fault in Fault:
            self.faults[fault] += verdict.count(fault)


def main(address: str, n_people: int) -> None:
    undisturbed = Undisturbed(address)
    print("ready", flush=True)
    with Load(address, CONVERSATIONS, n_people) as load:
        sys.stdin.read()
    failures, load.failures = [repr(failure) for failure in load.failures], []
    load.judge(undisturbed)
    gaps = [log.longest_gap_s for held in load.held for log in held.logs]
    found = {
        "streams": sum(len(held.logs) for held in load.held), "failed": failures, "moved": load.n_moved,
        "tokens": undisturbed.n_tokens, **undisturbed.faults, "sentences": undisturbed.sentences[:20],
        "longest_gap_seconds": round(max(gaps, default=0.0), 2),
    }  # fmt: skip
    print(json.dumps(found), flush=True)


main(sys.argv[1], int(sys.argv[2]))
