"""The scheduler on the real engine: whatever shares the batch, each job gets what it gets alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.errors import EngineError, OutOfKvMemory
from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.sampling import SamplingSettings
from kvferry.engine.scheduler import Job, Room, Scheduler, StepOutput, plan_rows

BLOCK = 32
N_BLOCKS = 128

_ids = count()


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine.load(smollm2_path, EngineOptions(n_threads=2, kv_bytes=N_BLOCKS * 1_474_560, context_length=1024))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def no_block_is_lost(engine: Engine) -> Iterator[None]:
    sequences = _Sequences.opened = []
    yield
    for sequence in sequences:
        sequence.release()
    assert engine.pool.n_free_blocks == N_BLOCKS


class _Sequences:
    """Those that a test made, to be released after it."""

    opened: ClassVar[list[KvSequence]] = []


@pytest.fixture(scope="module")
def prompts(golden: Path) -> list[list[int]]:
    recorded = json.loads((golden / "smollm2_q4_1" / "golden.json").read_text())
    return [prompt["input_ids"] for prompt in recorded["prompts"].values()]


def make_job(engine: Engine, tokens: list[int], **fields: object) -> Job:
    sequence = engine.new_sequence()
    _Sequences.opened.append(sequence)
    defaults = {
        "job_id": str(next(_ids)),
        "n_prompt_tokens": len(tokens),
        "sampling": SamplingSettings(),
        "max_tokens": 8,
        "end_token_ids": (),
    }
    return Job(sequence=sequence, token_ids=tokens, **(defaults | fields))


def run(scheduler: Scheduler, *jobs: Job) -> dict[str, list[StepOutput]]:
    """All jobs to their ends."""
    for job in jobs:
        scheduler.submit(job)
    outputs: dict[str, list[StepOutput]] = {job.job_id: [] for job in jobs}
    while scheduler.n_running + scheduler.n_queued:
        for output in scheduler.step():
            outputs[output.job_id].append(output)
    return outputs


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [output.token.token_id for output in outputs if output.token is not None]


# --- the plan


@given(
    jobs=st.lists(st.tuples(st.integers(1, 3000), st.booleans(), st.integers(-1, 1)), max_size=16),
    n_prefill_rows=st.integers(0, 600),
)
def test_a_plan_keeps_the_budget_and_starves_nobody(jobs: list[tuple[int, bool, int]], n_prefill_rows: int) -> None:
    is_decoding = [decoding for _, decoding, _ in jobs]
    pending = [1 if decoding else n for n, decoding, _ in jobs]
    priorities = [priority for _, _, priority in jobs]
    rows = plan_rows(pending, is_decoding, priorities, n_prefill_rows)
    assert all(0 <= n <= wanted for n, wanted in zip(rows, pending, strict=True))
    assert all(n == 1 for n, decoding in zip(rows, is_decoding, strict=True) if decoding)
    prefills = [job for job in zip(rows, pending, is_decoding, priorities, strict=True) if not job[2]]
    assert sum(n for n, *_ in prefills) == min(n_prefill_rows, sum(wanted for _, wanted, *_ in prefills))
    for n, wanted, _, priority in prefills:
        equals = [other for other, _, _, p in prefills if p == priority]
        assert n == wanted or n >= max(equals) - 1  # max-min fair, but for rounding
        assert n == wanted or not any(other for other, _, _, p in prefills if p < priority)


def test_a_plan_gives_a_short_prompt_all_of_it_beside_a_long_one() -> None:
    assert plan_rows([1000, 20], [False, False], [0, 0], 256) == [236, 20]
    assert plan_rows([1, 1000, 20], [True, False, False], [0, 0, 0], 64) == [1, 44, 20]


def test_a_plan_serves_a_higher_priority_first() -> None:
    assert plan_rows([1000, 20, 50], [False] * 3, [0, 1, 1], 64) == [0, 20, 44]
    assert plan_rows([1, 1000, 20], [True, False, False], [-5, 0, 1], 64) == [1, 44, 20]  # decodes always go on


# --- bits


@pytest.mark.parametrize("seed", range(4))
def test_a_job_gets_the_same_tokens_alone_and_in_any_company(
    engine: Engine, prompts: list[list[int]], seed: int
) -> None:
    chosen = random.Random(seed)
    settings = [SamplingSettings(temperature=t, seed=s, top_p=0.9) for t, s in ((0.0, 0), (0.8, 1), (1.2, 2))]
    asked = [(prompts[i % 4][: 40 + 37 * i], settings[i % 3]) for i in range(6)]
    alone = [tokens_of(next(iter(run(Scheduler(engine), make_job(engine, t, sampling=s)).values()))) for t, s in asked]
    scheduler = Scheduler(
        engine,
        max_running=chosen.choice([2, 4, 16]),
        row_budget=chosen.choice([16, 33, 100, 256]),
        prefill_rows_beside_decodes=chosen.choice([1, 7, 32, 64]),
    )
    jobs = [make_job(engine, tokens, sampling=sampling) for tokens, sampling in asked]
    outputs: dict[str, list[StepOutput]] = {job.job_id: [] for job in jobs}
    waiting = chosen.sample(jobs, len(jobs))
    while waiting or scheduler.n_running + scheduler.n_queued:
        if waiting and chosen.random() < 0.4:
            scheduler.submit(waiting.pop())
        for output in scheduler.step():
            outputs[output.job_id].append(output)
    assert [tokens_of(outputs[job.job_id]) for job in jobs] == alone


def test_a_job_goes_on_from_rows_and_tokens_that_exist(engine: Engine, prompts: list[list[int]]) -> None:
    prompt = prompts[0]
    (whole,) = run(Scheduler(engine), first := make_job(engine, prompt, max_tokens=12)).values()
    tokens = tokens_of(whole)
    known = prompt + tokens[:5]
    fork = first.sequence.fork(len(prompt) + 2)
    _Sequences.opened.append(fork)
    job = Job(
        job_id="rest",
        sequence=fork,
        token_ids=known,
        n_prompt_tokens=len(prompt),
        sampling=SamplingSettings(),
        max_tokens=12,
        end_token_ids=(),
    )
    outputs = run(Scheduler(engine), job)["rest"]
    assert tokens_of(outputs) == tokens[5:]
    assert [output.token_index for output in outputs if output.token] == list(range(5, 12))
    assert sum(output.n_rows for output in outputs[:1]) == 3


# --- ends


class EveryNth:
    """A rule: the i-th token of the answer is a multiple of n + i."""

    def __init__(self, n: int, vocab_size: int) -> None:
        self._n, self._vocab_size = n, vocab_size
        self.accepted: list[int] = []

    def mask(self) -> NDArray[np.uint32]:
        allowed = np.arange(-(-self._vocab_size // 32) * 32) % (self._n + len(self.accepted)) == 0
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)
        if len(self.accepted) > 6:
            raise EngineError("it is too much for the rule")


def test_a_job_keeps_to_its_rule_beside_jobs_without_one(engine: Engine, prompts: list[list[int]]) -> None:
    rules = [EveryNth(n, engine.config.vocab_size) for n in (100, 7)]
    free = make_job(engine, prompts[0], max_tokens=6)
    alone = tokens_of(run(Scheduler(engine), make_job(engine, prompts[0], max_tokens=6)).popitem()[1])
    jobs = [make_job(engine, prompts[0], max_tokens=6, rule=rule) for rule in rules]
    outputs = run(Scheduler(engine), jobs[0], free, jobs[1])
    for job, rule, n in zip(jobs, rules, (100, 7), strict=True):
        tokens = tokens_of(outputs[job.job_id])
        assert tokens == rule.accepted
        assert [token % (n + i) for i, token in enumerate(tokens)] == [0] * 6
    assert tokens_of(outputs[free.job_id]) == alone


def test_a_rule_that_gives_up_ends_its_job_alone(engine: Engine, prompts: list[list[int]]) -> None:
    free = make_job(engine, prompts[1], max_tokens=10)
    strict = make_job(engine, prompts[0], max_tokens=10, rule=EveryNth(3, engine.config.vocab_size))
    outputs = run(Scheduler(engine), strict, free)
    assert str(outputs[strict.job_id][-1].error) == "it is too much for the rule"
    assert len(tokens_of(outputs[strict.job_id])) == 6
    assert outputs[free.job_id][-1].finish == "length"


def test_a_job_ends_at_its_end_token_or_its_length(engine: Engine, prompts: list[list[int]]) -> None:
    scheduler = Scheduler(engine)
    job = make_job(engine, prompts[0], max_tokens=6)
    by_length = run(scheduler, job)[job.job_id]
    assert [output.finish for output in by_length] == [None] * 5 + ["length"]
    tokens = tokens_of(by_length)
    job = make_job(engine, prompts[0], max_tokens=6, end_token_ids=(tokens[2],))
    by_end = run(scheduler, job)[job.job_id]
    assert tokens_of(by_end) == tokens[: tokens.index(tokens[2]) + 1]
    assert by_end[-1].finish == "end"


def test_an_end_token_in_the_prompt_ends_nothing(engine: Engine, prompts: list[list[int]]) -> None:
    job = make_job(engine, [*prompts[0], 2], max_tokens=2, end_token_ids=(2,))
    assert len(tokens_of(run(Scheduler(engine), job)[job.job_id])) >= 1


@pytest.mark.parametrize(("answer", "finish"), [([7, 2], "end"), ([7] * 8, "length")])
def test_a_job_that_is_complete_on_arrival_computes_nothing(engine: Engine, answer: list[int], finish: str) -> None:
    job = make_job(engine, [1, *answer], n_prompt_tokens=1, max_tokens=8, end_token_ids=(2,))
    scheduler = Scheduler(engine)
    (output,) = run(scheduler, job)[job.job_id]
    assert (output.finish, output.token, scheduler.counters.n_steps) == (finish, None, 0)


def test_a_job_ends_with_the_context(engine: Engine, prompts: list[list[int]]) -> None:
    prompt = (prompts[2] * 2)[:1020]
    job = make_job(engine, prompt, max_tokens=100)
    outputs = run(Scheduler(engine), job)[job.job_id]
    assert len(tokens_of(outputs)) == 4
    assert outputs[-1].finish == "length"


def test_a_stopped_job_is_gone_at_once_and_keeps_its_rows(engine: Engine, prompts: list[list[int]]) -> None:
    scheduler = Scheduler(engine, max_running=1)
    running, queued = make_job(engine, prompts[0]), make_job(engine, prompts[1])
    scheduler.submit(running)
    scheduler.submit(queued)
    scheduler.step()
    assert scheduler.stop(running.job_id)
    assert running.sequence.n_rows == len(prompts[0])
    assert not scheduler.stop(running.job_id)
    assert {output.job_id for output in scheduler.step()} == {queued.job_id}
    assert scheduler.stop(queued.job_id)
    assert scheduler.step() == []
    assert (scheduler.n_running, scheduler.n_queued) == (0, 0)


# --- sharing


def test_decodes_go_on_beside_a_long_prompt(engine: Engine, prompts: list[list[int]]) -> None:
    scheduler = Scheduler(engine, prefill_rows_beside_decodes=64)
    decoding = make_job(engine, prompts[0], max_tokens=100)
    scheduler.submit(decoding)
    scheduler.step()
    long = make_job(engine, prompts[2][:640])
    scheduler.submit(long)
    for _ in range(640 // 64):
        by_job = {output.job_id: output for output in scheduler.step()}
        assert by_job[decoding.job_id].token is not None
        assert by_job[long.job_id].n_rows == 64
    assert by_job[long.job_id].token is not None


def test_counters_tell_prefilled_rows_and_drawn_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    scheduler = Scheduler(engine)
    run(scheduler, make_job(engine, prompts[0], max_tokens=5))
    assert scheduler.counters.n_rows_prefilled == len(prompts[0])
    assert scheduler.counters.n_tokens_generated == 5
    assert repr(scheduler) == "<Scheduler 0 running, 0 queued, 5 steps>"


# --- memory


def hog(engine: Engine, n_left: int) -> None:
    """Take all but n_left blocks."""
    sequence = engine.new_sequence()
    sequence.reserve((engine.pool.n_free_blocks - n_left) * BLOCK)
    _Sequences.opened.append(sequence)


def test_a_prompt_that_never_fits_is_refused(engine: Engine, prompts: list[list[int]]) -> None:
    hog(engine, 2)
    job = make_job(engine, prompts[2])
    (output,) = run(Scheduler(engine), job)[job.job_id]
    assert isinstance(output.error, OutOfKvMemory)
    assert job.sequence.n_rows == 0


def test_a_prompt_that_fits_later_waits_in_the_queue(engine: Engine, prompts: list[list[int]]) -> None:
    hog(engine, 3)
    first, second = (make_job(engine, [n, *prompts[0]], max_tokens=4) for n in (3, 4))  # 46 tokens: two blocks each
    scheduler = Scheduler(engine)
    scheduler.submit(first)
    scheduler.submit(second)
    outputs = scheduler.step()
    assert (scheduler.n_running, scheduler.n_queued) == (1, 1)
    while scheduler.n_running and outputs:
        outputs = scheduler.step()
        if any(output.finish for output in outputs):
            first.sequence.release()
            break
    assert {output.job_id for output in scheduler.step()} == {second.job_id}


def test_the_youngest_goes_when_memory_ends_and_the_others_go_on(engine: Engine, prompts: list[list[int]]) -> None:
    hog(engine, 5)
    old, young = (make_job(engine, [n, *prompts[0]], max_tokens=100) for n in (3, 4))  # 46 tokens; blocks end at 64
    outputs = {}
    scheduler = Scheduler(engine)
    scheduler.submit(old)
    scheduler.submit(young)
    while scheduler.n_running != 1:
        for output in scheduler.step():
            outputs.setdefault(output.job_id, []).append(output)
    assert isinstance(outputs[young.job_id][-1].error, OutOfKvMemory)
    assert all(output.error is None for output in outputs[old.job_id])
    young.sequence.release()
    rest = []
    while scheduler.n_running:
        rest += scheduler.step()
    assert len(tokens_of(outputs[old.job_id] + rest)) == 100


def test_room_is_asked_for_and_waited_for(engine: Engine, prompts: list[list[int]]) -> None:
    hog(engine, 0)
    asked: list[int] = []

    def make_room(n_blocks: int) -> Room:
        asked.append(n_blocks)
        if len(asked) == 1:
            return "later"
        _Sequences.opened.pop(0).release()
        return "free"

    scheduler = Scheduler(engine, make_room=make_room)
    job = make_job(engine, prompts[0])
    scheduler.submit(job)
    assert scheduler.step() == []
    assert scheduler.step() != []
    assert asked == [2, 2]


def test_what_breaks_the_promise_of_a_job_is_refused(engine: Engine) -> None:
    for fields in ({"n_prompt_tokens": 0}, {"n_prompt_tokens": 3}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match="job "):
            Scheduler(engine).submit(make_job(engine, [1, 2], **fields))
