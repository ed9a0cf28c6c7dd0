"""Jobs that begin with the same tokens compute them once, and hold their rows once: counted to the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import psutil
import pytest

from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.packing import pack_model
from kvferry.engine.sampling import SamplingSettings
from kvferry.engine.scheduler import Job, Scheduler, StepOutput

from .engine.tiny_models import SHAPES, write_model

BLOCK, N_BLOCKS = 32, 64
SAMPLED = SamplingSettings(temperature=1.0, seed=3)
PROMPT = np.random.default_rng(7).integers(0, 100, 200).tolist()

_ids = count()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Real kernels, a small random model, 64 blocks."""
    file = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", SHAPES["grouped by three"])
    block_bytes = 2 * 2 * 64 * BLOCK * 4
    engine = Engine(
        pack_model(open_model(file.path), 512), EngineOptions(n_threads=1, kv_bytes=N_BLOCKS * block_bytes), "f" * 32
    )
    assert engine.pool.n_blocks == N_BLOCKS
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def no_block_is_lost(engine: Engine) -> Iterator[None]:
    yield
    assert engine.pool.n_free_blocks == N_BLOCKS


class Run:
    """A scheduler, its jobs' outputs, and their sequences, which are let go of at the end of each job."""

    def __init__(self, engine: Engine, **options: object) -> None:
        self.engine = engine
        self.scheduler = Scheduler(engine, **options)
        self.outputs: dict[str, list[StepOutput]] = {}
        self.sequences: dict[str, KvSequence] = {}

    def submit(self, tokens: list[int], **fields: object) -> str:
        job_id = str(next(_ids))
        self.sequences[job_id] = self.engine.new_sequence()
        self.outputs[job_id] = []
        defaults = {"n_prompt_tokens": len(tokens), "sampling": SAMPLED, "max_tokens": 6, "end_token_ids": ()}
        self.scheduler.submit(
            Job(job_id=job_id, sequence=self.sequences[job_id], token_ids=tokens, **(defaults | fields))
        )
        return job_id

    def step(self) -> None:
        for output in self.scheduler.step():
            self.outputs[output.job_id].append(output)
            if output.finish or output.error:
                self.sequences[output.job_id].release()

    def to_the_end(self) -> None:
        while self.scheduler.n_running + self.scheduler.n_queued:
            self.step()

    def tokens(self, job_id: str) -> list[int]:
        return [output.token.token_id for output in self.outputs[job_id] if output.token]

    def n_computed(self, job_id: str) -> int:
        return sum(output.n_rows for output in self.outputs[job_id])

    @property
    def n_held(self) -> int:
        return self.engine.pool.n_blocks - self.engine.pool.n_free_blocks


@pytest.fixture
def alone(engine: Engine) -> Callable[..., list[int]]:
    """What a job draws that shares nothing."""

    def tokens_of(tokens: list[int], **fields: object) -> list[int]:
        run = Run(engine)
        job = run.submit(tokens, **fields)
        run.to_the_end()
        return run.tokens(job)

    return tokens_of


def test_several_answers_to_one_prompt_compute_it_once(engine: Engine, alone: Callable[..., list[int]]) -> None:
    run = Run(engine)
    seeds = [SamplingSettings(temperature=1.0, seed=seed) for seed in range(4)]
    jobs = [run.submit(PROMPT, sampling=sampling) for sampling in seeds]
    run.to_the_end()
    assert [run.tokens(job) for job in jobs] == [alone(PROMPT, sampling=sampling) for sampling in seeds]
    assert len({tuple(run.tokens(job)) for job in jobs}) == 4
    assert [run.outputs[job][-1].n_shared for job in jobs] == [0, 192, 192, 192]
    assert [run.n_computed(job) for job in jobs] == [200 + 5, 8 + 5, 8 + 5, 8 + 5]
    assert run.scheduler.counters.n_rows_shared == 3 * 192
    assert run.scheduler.counters.n_rows_prefilled == 200 + 3 * 8


def test_jobs_of_two_namespaces_share_nothing_and_draw_the_same(
    engine: Engine, alone: Callable[..., list[int]]
) -> None:
    run = Run(engine)
    jobs = [run.submit(PROMPT, namespace=namespace) for namespace in ("a", "b", "a", "")]
    run.to_the_end()
    assert {tuple(run.tokens(job)) for job in jobs} == {tuple(alone(PROMPT))}
    assert [run.outputs[job][-1].n_shared for job in jobs] == [0, 0, 192, 0]


def test_a_shared_prompt_is_held_once_to_the_block(engine: Engine) -> None:
    run = Run(engine)
    jobs = [run.submit(PROMPT, max_tokens=60) for _ in range(4)]  # 200 rows: 6 whole blocks and a part of one
    run.step()
    assert run.n_held == 7  # those that wait hold nothing
    run.step()
    assert run.n_held == 7 + 3 * 1
    while len(run.tokens(jobs[-1])) < 30:  # beyond row 224 each has begun another block
        run.step()
    assert run.n_held == 6 + 4 * 2
    run.scheduler.stop(jobs[0])
    run.sequences[jobs[0]].release()
    assert run.n_held == 6 + 3 * 2  # the prompt stays as long as anybody has it
    run.to_the_end()


def test_a_common_beginning_is_waited_for_and_the_rest_runs_together(
    engine: Engine, alone: Callable[..., list[int]]
) -> None:
    run = Run(engine, row_budget=64)
    questions = [PROMPT[:100] + [n] * 20 for n in range(5)]
    jobs = [run.submit(question) for question in questions]
    run.step()
    assert (run.scheduler.n_running, run.scheduler.n_queued) == (1, 4)
    run.step()
    assert (run.scheduler.n_running, run.scheduler.n_queued) == (1, 4)  # 64 of the common 96 rows were there
    run.step()
    assert (run.scheduler.n_running, run.scheduler.n_queued) == (5, 0)
    run.to_the_end()
    assert [run.tokens(job) for job in jobs] == [alone(question) for question in questions]
    assert [run.outputs[job][-1].n_shared for job in jobs] == [0, 96, 96, 96, 96]


def test_a_job_with_nothing_in_common_waits_for_nobody(engine: Engine) -> None:
    run = Run(engine, row_budget=64)
    run.submit(PROMPT)
    run.submit(PROMPT)
    run.submit([5, *PROMPT])
    run.step()
    assert (run.scheduler.n_running, run.scheduler.n_queued) == (2, 1)
    run.to_the_end()


def test_when_the_one_that_computes_is_stopped_another_goes_on_from_its_rows(
    engine: Engine, alone: Callable[..., list[int]]
) -> None:
    run = Run(engine, row_budget=32)
    first, second, third = (run.submit(PROMPT) for _ in range(3))
    for _ in range(4):
        run.step()
    run.scheduler.stop(first)
    run.sequences[first].release()
    run.to_the_end()
    assert run.tokens(second) == run.tokens(third) == alone(PROMPT)
    assert run.n_computed(second) == 200 - 96 + 5  # the fourth step's rows were not taken over yet
    assert run.n_computed(third) == 8 + 5


def test_a_prompt_that_fits_only_once_is_answered_several_times(engine: Engine) -> None:
    hog = engine.new_sequence()
    hog.reserve((N_BLOCKS - 10) * BLOCK)
    run = Run(engine)
    jobs = [run.submit(PROMPT) for _ in range(4)]  # 7 blocks each if they did not share
    run.to_the_end()
    assert all(run.outputs[job][-1].finish == "length" for job in jobs)
    assert all(run.tokens(job) == run.tokens(jobs[0]) for job in jobs)
    hog.release()


def test_rows_that_somebody_else_has_by_the_time_of_admission_are_used(engine: Engine) -> None:
    """A session that ended while this one waited for its place."""
    idle = engine.new_sequence()
    asked: list[str] = []

    def find_rows(job: Job) -> tuple[KvSequence, int] | None:
        asked.append(job.job_id)
        return (idle, idle.n_rows) if idle.n_rows else None

    run = Run(engine, max_running=1, find_rows=find_rows)
    blocker = run.submit([9] * 10)
    waiting = run.submit(PROMPT)
    run.step()
    assert asked == [blocker]
    other = Run(engine)
    other.submit(PROMPT, max_tokens=1)
    other.scheduler.step()
    idle.adopt(next(iter(other.sequences.values())), 160)
    next(iter(other.sequences.values())).release()
    run.to_the_end()
    assert (run.outputs[waiting][-1].n_shared, run.n_computed(waiting)) == (160, 40 + 5)
    idle.release()


# --- priorities


def test_the_queue_is_in_order_of_priority_then_of_arrival(engine: Engine) -> None:
    run = Run(engine, max_running=1)
    late = run.submit([1], arrival=7, max_tokens=1)
    early = run.submit([2], arrival=5, max_tokens=1)
    urgent = run.submit([3], arrival=9, max_tokens=1, priority=1)
    unimportant = run.submit([4], arrival=1, max_tokens=1, priority=-1)
    ended = []
    while run.scheduler.n_queued + run.scheduler.n_running:
        run.step()
        ended += [job for job, outputs in run.outputs.items() if outputs and job not in ended]
    assert ended == [urgent, early, late, unimportant]


def test_an_urgent_prompt_is_prefilled_before_one_that_runs_already(engine: Engine) -> None:
    run = Run(engine, row_budget=32)
    slow = run.submit(PROMPT)
    run.step()
    urgent = run.submit([5, *PROMPT[:99]], priority=1)
    for _ in range(4):
        run.step()
    assert len(run.tokens(urgent)) == 1
    assert run.n_computed(slow) < 64
    run.to_the_end()


def test_an_urgent_job_does_not_wait_for_an_unimportant_ones_rows(engine: Engine) -> None:
    run = Run(engine, row_budget=32)
    slow = run.submit(PROMPT, priority=-1)
    run.step()
    urgent = run.submit(PROMPT)
    run.step()
    assert run.scheduler.n_running == 2
    run.to_the_end()
    assert run.outputs[urgent][-1].n_shared == 32  # what was there when it came
    assert run.tokens(slow) == run.tokens(urgent)


def test_the_least_important_goes_when_memory_ends(engine: Engine) -> None:
    hog = engine.new_sequence()
    hog.reserve((N_BLOCKS - 2) * BLOCK)
    run = Run(engine)
    first = run.submit([1] * 20, max_tokens=100, priority=-1)
    second = run.submit([2] * 20, max_tokens=40)
    run.to_the_end()
    assert run.outputs[first][-1].error is not None
    assert run.outputs[second][-1].finish == "length"
    hog.release()


# --- nothing grows


def test_a_thousand_sessions_leave_no_block_and_no_memory_behind(engine: Engine) -> None:
    process = psutil.Process()
    run = Run(engine, max_running=8)

    def sessions(first: int, n: int) -> None:
        for number in range(first, first + n):
            run.submit([number % 100, number // 100, *PROMPT[: number % 50]], max_tokens=3)
            while run.scheduler.n_queued > 4:
                run.step()
        run.to_the_end()
        assert engine.pool.n_free_blocks == N_BLOCKS
        assert all(len(run.tokens(job)) == 3 for job in run.outputs)
        run.outputs.clear()
        run.sequences.clear()

    sessions(0, 200)
    grown = []
    for first in range(200, 1200, 200):
        before = process.memory_info().rss
        sessions(first, 200)
        grown.append(process.memory_info().rss - before)
    assert min(grown) < (4 << 20) / 5  # what leaks, leaks every time; the process may have grown once for other reasons
