"""Speculation changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.engine.draft import CATCH_UP_ROWS, DraftMismatch, DraftModel
from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.errors import EngineError
from kvferry.engine.sampling import SamplingSettings
from kvferry.engine.scheduler import Job, Scheduler, StepOutput
from kvferry.engine.speculation import (
    MOST_GUESSED_ROWS,
    PROBE_EVERY,
    ROW_COSTS,
    Ask,
    Guesses,
    PromptLookup,
    Proposer,
    Speculator,
    best_length,
)

N_BLOCKS = 64
PHRASE = [504, 3890, 28, 1172, 913, 7, 42, 4095, 77]

_ids = count()


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine.load(smollm2_path, EngineOptions(n_threads=2, kv_bytes=N_BLOCKS * 1_474_560, context_length=512))
    yield engine
    engine.close()


@dataclass
class Guessing:
    """Proposes what the answer will really be, each token wrong with some chance."""

    truth: dict[int, list[int]]  # the answer by a prompt's first token
    wrong: float = 0.0
    is_free: bool = True
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    forgotten: list[int] = field(default_factory=list)

    def propose(self, asks: Sequence[Ask]) -> list[NDArray[np.int32]]:
        found = []
        for ask in asks:
            rest = self.truth[int(ask.tokens[0])][len(ask.tokens) :][: ask.n_most]
            found.append(np.array([t + (self.chance.random() < self.wrong) for t in rest], np.int32))
        return found

    def forget(self, serial: int) -> None:
        self.forgotten.append(serial)


def ask(tokens: list[int], n_most: int, serial: int = 0) -> Ask:
    return Ask(serial, np.array(tokens, np.int32), n_most, SamplingSettings())


def make_job(engine: Engine, tokens: list[int], **fields: object) -> Job:
    defaults = {
        "job_id": str(next(_ids)),
        "n_prompt_tokens": len(tokens),
        "sampling": SamplingSettings(),
        "max_tokens": 24,
        "end_token_ids": (),
    }
    return Job(sequence=engine.new_sequence(), token_ids=tokens, **(defaults | fields))


def run(scheduler: Scheduler, jobs: list[Job]) -> list[list[StepOutput]]:
    for job in jobs:
        scheduler.submit(job)
    outputs: dict[str, list[StepOutput]] = {job.job_id: [] for job in jobs}
    while scheduler.n_running + scheduler.n_queued:
        for output in scheduler.step():
            outputs[output.job_id].append(output)
    return [outputs[job.job_id] for job in jobs]


def rows_of(engine: Engine, job: Job) -> list[bytes]:
    planes = engine.geometry.empty_planes(job.sequence.n_rows)
    found = []
    for layer in (0, engine.geometry.n_layers - 1):
        job.sequence.read_planes(layer, 0, job.sequence.n_rows, planes)
        found += [plane.tobytes() for plane in planes]
    job.sequence.release()
    return found


def told(outputs: list[StepOutput]) -> list[tuple[object, ...]]:
    """What a client sees."""
    return [(o.token, o.token_index, o.finish) for o in outputs if o.token is not None]


def cases(seed: int) -> list[dict[str, object]]:
    """Prompts of all kinds with all kinds of settings."""
    chosen, found = random.Random(seed), []
    for i in range(5):
        text = chosen.choice([PHRASE * 4, PHRASE + [chosen.randrange(3, 40_000) for _ in range(40)]])
        settings = SamplingSettings(
            temperature=chosen.choice([0.0, 0.7, 1.3]),
            seed=i,
            top_p=chosen.choice([1.0, 0.9]),
            repetition_penalty=chosen.choice([1.0, 1.2]),
            logprobs=chosen.random() < 0.5,
        )
        found.append({"tokens": [1000 + i, *text], "sampling": settings, "max_tokens": chosen.choice([1, 2, 17, 40])})
    return found


# --- the same answers


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_tokens_logprobs_ends_and_rows_are_those_of_plain_decoding(engine: Engine, seed: int, wrong: float) -> None:
    plain = [make_job(engine, **case) for case in cases(seed)]
    expected = [run(Scheduler(engine), [job])[0] for job in plain]
    truth = {job.token_ids[0]: [*job.token_ids, *tokens_of(o)] for job, o in zip(plain, expected, strict=True)}
    rows = [rows_of(engine, job) for job in plain]
    for proposer in (PromptLookup(), Guessing(truth, wrong)):
        for max_running in (1, 3, 16):
            jobs = [make_job(engine, **case) for case in cases(seed)]
            scheduler = Scheduler(engine, max_running=max_running, speculator=Speculator(proposer))
            outputs = run(scheduler, jobs)
            assert [told(o) for o in outputs] == [told(o) for o in expected]
            assert [rows_of(engine, job) for job in jobs] == rows
    assert engine.pool.n_free_blocks == N_BLOCKS


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [output.token.token_id for output in outputs if output.token is not None]


def test_an_end_token_ends_the_answer_in_the_middle_of_a_proposal(engine: Engine) -> None:
    (expected,) = run(Scheduler(engine), [job := make_job(engine, [1, *PHRASE])])
    tokens = tokens_of(expected)
    end = next(i for i in range(9, 24) if tokens[i] not in tokens[:i])
    job.sequence.release()
    guessing = Guessing({1: [1, *PHRASE, *tokens]})
    scheduler = Scheduler(engine, speculator=Speculator(guessing))
    (outputs,) = run(scheduler, [job := make_job(engine, [1, *PHRASE], end_token_ids=(tokens[end],))])
    assert tokens_of(outputs) == tokens[: end + 1]
    assert [o.finish for o in outputs[-2:]] == [None, "end"]
    assert job.sequence.n_rows == 1 + len(PHRASE) + end  # the end token's row is nobody's business
    assert len(guessing.forgotten) == 1
    job.sequence.release()


def test_a_rule_is_told_every_token_once_and_in_order(engine: Engine) -> None:
    class Rule:
        def __init__(self) -> None:
            self.accepted: list[int] = []

        def mask(self) -> NDArray[np.uint32]:
            return np.full(-(-engine.config.vocab_size // 32), 0xFFFFFFFF, np.uint32)

        def accept(self, token_id: int) -> None:
            if len(self.accepted) == 20:
                raise EngineError("too complex")
            self.accepted.append(token_id)

    rule = Rule()
    (plain,) = run(Scheduler(engine), [job := make_job(engine, [1, *PHRASE * 3], max_tokens=40, rule=rule)])
    n_rows, tokens = job.sequence.n_rows, rule.accepted
    job.sequence.release()
    guessing = Guessing({1: [1, *PHRASE * 3, *tokens, 5, 5, 5]})
    again = Rule()
    scheduler = Scheduler(engine, speculator=Speculator(guessing))
    (outputs,) = run(scheduler, [job := make_job(engine, [1, *PHRASE * 3], max_tokens=40, rule=again)])
    assert again.accepted == tokens
    assert (str(outputs[-1].error), str(plain[-1].error)) == ("too complex", "too complex")
    assert job.sequence.n_rows == n_rows
    job.sequence.release()


# --- fewer steps


def test_a_repetitive_text_takes_a_fraction_of_the_steps(engine: Engine) -> None:
    (expected,) = run(Scheduler(engine), [first := make_job(engine, PHRASE * 8, max_tokens=100)])
    scheduler = Scheduler(engine, speculator=Speculator(PromptLookup()))
    (outputs,) = run(scheduler, [job := make_job(engine, PHRASE * 8, max_tokens=100)])
    assert told(outputs) == told(expected)
    assert scheduler.counters.n_steps < 40
    assert 60 < scheduler.counters.n_tokens_accepted <= scheduler.counters.n_tokens_proposed
    first.sequence.release()
    job.sequence.release()


def test_wrong_proposals_are_given_up_and_right_ones_taken_up_again(engine: Engine) -> None:
    (expected,) = run(Scheduler(engine), [job := make_job(engine, [1, *PHRASE], max_tokens=200)])
    job.sequence.release()
    guessing = Guessing({1: [1, *PHRASE, *tokens_of(expected)]}, wrong=1.0)
    scheduler = Scheduler(engine, speculator=Speculator(guessing))
    scheduler.submit(job := make_job(engine, [1, *PHRASE], max_tokens=200))
    for _ in range(60):
        scheduler.step()
    n_wrong = scheduler.counters.n_tokens_proposed
    assert n_wrong < 20
    guessing.wrong = 0.0
    while scheduler.n_running:
        scheduler.step()
    assert scheduler.counters.n_steps < 110
    job.sequence.release()


def test_a_costly_proposer_is_asked_again_now_and_then(engine: Engine) -> None:
    speculator, record = Speculator(Guessing({1: [1] * 99}, is_free=False)), Guesses(n_wrong=100)
    lengths = [speculator.propose([ask([1], 50)], [record])[1][0] for _ in range(3 * PROBE_EVERY)]
    assert sum(lengths) == 2


def test_a_prompt_gets_on_beside_an_answer_that_is_guessed_at_every_step(engine: Engine) -> None:
    """A pacer measures steps without proposals before it lets a prompt in."""
    (expected,) = run(Scheduler(engine), [job := make_job(engine, [1, *PHRASE], max_tokens=200)])
    job.sequence.release()
    guessing = Guessing({1: [1, *PHRASE, *tokens_of(expected)]})
    scheduler = Scheduler(engine, speculator=Speculator(guessing), clock=count().__next__)
    jobs = [make_job(engine, [1, *PHRASE], max_tokens=200), make_job(engine, list(range(100, 140)), max_tokens=1)]
    scheduler.submit(jobs[0])
    while not scheduler.counters.n_tokens_accepted:
        scheduler.step()
    scheduler.submit(jobs[1])
    ended = [o.job_id for _ in range(400) for o in scheduler.step() if o.finish]
    assert ended == [jobs[1].job_id, jobs[0].job_id]
    for job in jobs:
        job.sequence.release()


def test_nothing_is_proposed_beside_a_prompt(engine: Engine) -> None:
    scheduler = Scheduler(engine, speculator=Speculator(PromptLookup()), prefill_rows_beside_decodes=16)
    jobs = [make_job(engine, [9, *PHRASE * 4], max_tokens=400)]
    scheduler.submit(jobs[0])
    while not scheduler.counters.n_tokens_accepted:
        scheduler.step()
    jobs.append(make_job(engine, list(range(100, 200))))
    scheduler.submit(jobs[1])
    before = scheduler.counters.n_tokens_proposed
    for _ in range(100 // 16):
        assert len([o for o in scheduler.step() if o.token]) == 1
    assert scheduler.counters.n_tokens_proposed == before
    for job in jobs:
        scheduler.stop(job.job_id)
        job.sequence.release()


def test_proposals_take_no_memory_that_others_need(engine: Engine) -> None:
    hog = engine.new_sequence()
    hog.reserve((N_BLOCKS - 3) * 32)
    jobs = [make_job(engine, [i, *PHRASE * 3], max_tokens=30) for i in (1, 2)]  # 28 tokens, which end in a second block
    scheduler = Scheduler(engine, speculator=Speculator(PromptLookup()))
    for job in jobs:
        scheduler.submit(job)
    outputs = [output for _ in range(12) for output in scheduler.step()]
    assert not any(output.error for output in outputs[:6])
    for job in jobs:
        scheduler.stop(job.job_id)
        job.sequence.release()
    hog.release()


# --- what is proposed


def test_the_latest_place_is_looked_up_whose_continuation_is_long_enough() -> None:
    lookup = PromptLookup(longest=3, shortest=2)

    def propose(tokens: list[int], n: int) -> list[int]:
        return lookup.propose([ask(tokens, n)])[0].tolist()

    assert propose([1, 2, 3, 4, 5, 1, 2, 3], 2) == [4, 5]
    assert propose([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1) == [5]
    assert propose([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 5) == [4, 1, 2, 3, 5]
    assert propose([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 9) == [4, 1, 2, 3, 5, 1, 2, 3]
    assert propose([9, 2, 3, 7, 8, 2, 3], 2) == [7, 8]  # two are enough
    assert propose([1, 2, 3, 4], 4) == []
    assert propose([5, 5, 5, 5], 2) == [5]
    assert propose([5], 2) == []


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60), n=st.integers(0, 8))
def test_a_proposal_is_what_followed_the_same_tokens(tokens: list[int], n: int) -> None:
    found = PromptLookup().propose([ask(tokens, n)])[0].tolist()
    assert len(found) <= n
    text = tokens[-2:]
    if found:
        assert any(tokens[i : i + 2 + len(found)] == text + found for i in range(len(tokens)))


def test_more_is_proposed_the_likelier_it_is_right_and_less_the_more_sessions_run() -> None:
    lengths = [best_length(chance, ROW_COSTS, 1, 16) for chance in (0.1, 0.6, 0.9, 0.99)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (0, 16)
    assert [best_length(0.8, ROW_COSTS, n, 16) for n in (1, 4, 16)] == sorted(
        (best_length(0.8, ROW_COSTS, n, 16) for n in (1, 4, 16)), reverse=True
    )
    assert best_length(0.9, ROW_COSTS, 16, 16) == 0


def test_what_rows_cost_is_learned_and_decides() -> None:
    sure = Guesses()
    for _ in range(10):
        sure.learn(4, was_wrong=False)
    tokens = PHRASE * 4

    def length(speculator: Speculator) -> int:
        return speculator.propose([ask(tokens, 100)], [sure])[1][0]

    costly, cheap = Speculator(PromptLookup()), Speculator(PromptLookup())
    for _ in range(100):
        for n in (0, 1, 2, 4, 8, 16):
            costly.learn(1, n, 0.01 * (1 + n))
            cheap.learn(1, n, 0.01 * (1 + 0.02 * n))
    assert length(costly) == 0
    assert length(cheap) == 16


def test_a_steps_proposals_are_bounded_together() -> None:
    sure = Guesses(n_right=100)
    asks = [ask([i, *PHRASE * 4], 100, serial=i) for i in range(3)]
    speculator = Speculator(PromptLookup())
    for _ in range(100):
        for n in (0, 16):
            speculator.learn(3, n, 0.01)
    _, lengths = speculator.propose(asks, [sure] * 3)
    assert lengths == [16, 16, MOST_GUESSED_ROWS - 32]


# --- a draft model


def draft(engine: Engine) -> DraftModel:
    return DraftModel(engine, engine.config.vocab_size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_model_itself_is_always_right(engine: Engine, temperature: float) -> None:
    settings = [SamplingSettings(temperature=temperature, seed=seed) for seed in (1, 2)]
    prompts = [[7, *PHRASE * 5], [8, *PHRASE]]  # the first one is longer than the draft reads in a step
    assert len(prompts[0]) > CATCH_UP_ROWS
    jobs = [make_job(engine, t, sampling=s, max_tokens=40) for t, s in zip(prompts, settings, strict=True)]
    expected = run(Scheduler(engine), jobs)
    scheduler = Scheduler(engine, speculator=Speculator(draft(engine)))
    again = [make_job(engine, t, sampling=s, max_tokens=40) for t, s in zip(prompts, settings, strict=True)]
    outputs = run(scheduler, again)
    assert [told(o) for o in outputs] == [told(o) for o in expected]
    assert scheduler.counters.n_tokens_accepted == scheduler.counters.n_tokens_proposed > 40
    assert scheduler.counters.n_steps < 35
    for job in (*jobs, *again):
        job.sequence.release()
    assert engine.pool.n_free_blocks == N_BLOCKS  # the draft has let go of its rows


def test_a_draft_without_memory_proposes_nothing(engine: Engine) -> None:
    hog = engine.new_sequence()
    hog.reserve(N_BLOCKS * 32)
    assert draft(engine).propose([ask(PHRASE, 4)])[0].tolist() == []
    hog.release()


def test_a_draft_of_another_vocabulary_is_refused(engine: Engine) -> None:
    with pytest.raises(DraftMismatch, match="same family"):
        DraftModel(engine, engine.config.vocab_size + 1)


def test_a_proposer_is_what_the_scheduler_asks_for() -> None:
    proposers: list[Proposer] = [PromptLookup(), Guessing({})]
    assert all(proposer.propose([]) == [] for proposer in proposers)
