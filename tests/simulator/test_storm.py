"""Thousands of clusters in the worst weather: no token is ever lost, doubled or another one (promise 13)."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from kvferry.coordinator.memory_registry import Ledger
from kvferry.coordinator.registry import FinishReason, TurnOutcome
from kvferry.simulator import storm, virtual_time
from kvferry.simulator.history import check
from kvferry.simulator.storm import SOMETIMES, Storm, run_seed, run_seeds

REGRESSIONS = (31, 579, 645, 682, 751, 8134, 8902, 9996)
"""Seeds that found something; docs/coordinator.md says what."""


def test_a_few_hundred_storms_break_no_promise() -> None:
    tally = run_seeds(range(250))
    assert [(v.seed, v.problems) for v in tally.failed] == []
    assert tally.n_tokens > 10_000


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_was_found_once_stays_fixed(seed: int) -> None:
    assert run_seed(seed).problems == ()


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_ten_thousand_storms_break_no_promise_and_meet_everything() -> None:
    tally = run_seeds(range(10_000), n_processes=2)
    assert [(v.seed, v.problems) for v in tally.failed] == []
    assert tally.never == []
    assert set(SOMETIMES) <= set(tally.sometimes)


def test_the_same_seed_is_the_same_storm() -> None:
    first, again, other = run_seed(7), run_seed(7), run_seed(8)
    assert first == again
    assert first.fingerprint != other.fingerprint


# A checker that sees nothing proves nothing: each kind of damage is planted once.


@pytest.fixture
def after_a_storm() -> Storm:
    """A history without a fault in it, with answers in it."""
    calm = Storm(9)
    with storm.quiet():
        virtual_time.run(calm.run())
    assert check(calm.history, calm.ledger) == []
    assert len(calm.history.tokens) > 20
    return calm


def test_the_checker_sees_a_lost_and_a_doubled_token(after_a_storm: Storm) -> None:
    tokens = after_a_storm.history.tokens
    followed = {(t.reader, t.index) for t in tokens}
    lost = tokens.pop(next(i for i, t in enumerate(tokens) if t.index > 0 and (t.reader, t.index + 1) in followed))
    assert any("came with a gap" in p for p in check(after_a_storm.history, after_a_storm.ledger))
    tokens.append(dataclasses.replace(lost, index=lost.index - 1))
    assert any("came twice" in p for p in check(after_a_storm.history, after_a_storm.ledger))


def test_the_checker_sees_another_token_and_an_older_epoch(after_a_storm: Storm) -> None:
    tokens = after_a_storm.history.tokens
    number, seen = next((i, t) for i, t in enumerate(tokens) if t.index > 2)
    tokens[number] = dataclasses.replace(seen, token_id=seen.token_id ^ 1, epoch=0)
    problems = check(after_a_storm.history, after_a_storm.ledger)
    assert any("to a reader" in p for p in problems)
    assert any("older epoch" in p for p in problems)


def kept_turn(ledger: Ledger) -> tuple[str, int, TurnOutcome]:
    """A turn of more than one token."""
    for session_id, turns in ledger.turns.items():
        for number, turn in enumerate(turns):
            if turn.outcome is not None and len(turn.outcome.answer_ids) > 1:
                return session_id, number, turn.outcome
    raise AssertionError("no such turn")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"answer_ids": np.array([1, 2, 3], dtype=np.int32)}, "the answer kept is"),
        ({"reason": FinishReason.ERROR, "error_code": "internal"}, "ended with internal"),
        (None, "still open"),
    ],
)
def test_the_checker_sees_what_the_registry_should_not_have(
    after_a_storm: Storm, damage: dict[str, object] | None, problem: str
) -> None:
    session_id, number, outcome = kept_turn(after_a_storm.ledger)
    turns = after_a_storm.ledger.turns[session_id]
    damaged = None if damage is None else dataclasses.replace(outcome, **damage)
    turns[number] = dataclasses.replace(turns[number], outcome=damaged)
    assert any(problem in p for p in check(after_a_storm.history, after_a_storm.ledger))


def test_the_checker_sees_an_acknowledged_turn_that_is_gone(after_a_storm: Storm) -> None:
    session_id, number, _ = kept_turn(after_a_storm.ledger)
    del after_a_storm.ledger.turns[session_id][number]
    assert any("acknowledged and lost" in p for p in check(after_a_storm.history, after_a_storm.ledger))


def test_a_registry_that_forgets_the_epochs_of_deleted_sessions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "epoch_floor", property(lambda _: 0, lambda *_: None))
    tally = run_seeds(range(10))
    assert any("came after" in problem for verdict in tally.failed for problem in verdict.problems)


def test_a_coordinator_that_forgets_to_drop_old_epochs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the fence out of the real code and the storms find it."""
    from kvferry.coordinator.turn import Phase, Turn

    def receive_anything(self: Turn, epoch: int, tokens, now_s: float) -> None:
        for token in tokens:
            if self.phase is Phase.RUNNING:
                self._accept(token, now_s)

    monkeypatch.setattr(Turn, "receive", receive_anything)
    assert run_seeds(range(40)).failed


# The virtual clock.


def test_an_hour_of_sleep_takes_no_time() -> None:
    async def sleep() -> float:
        await asyncio.gather(*(asyncio.sleep(n) for n in range(3_600)))
        return asyncio.get_running_loop().time()

    assert virtual_time.run(sleep()) == pytest.approx(3_599, abs=0.01)


def test_a_deadlock_is_an_error_and_not_a_wait() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.NobodyWakes):
        virtual_time.run(wait())
