"""Continuous batching: every step is one mixed forward pass of all running decodes and some prefill chunks.

The scheduler knows jobs and rows, never sessions, stores or clients. It has no clock and no thread of its own: whoever
owns the engine calls `step` in a loop. Because the engine's bits do not depend on chunking or on the batch, the plan
below is free to share rows as it likes; only waiting times depend on it.

A job waits in the queue for a place, for memory, and for another job that is computing rows which both need.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.engine import Chunk
from kvferry.engine.errors import EngineError, OutOfKvMemory
from kvferry.engine.jobs import Counters, Finish, Job, Running, StepOutput, out_of_memory, plan_rows
from kvferry.engine.kv_cache import KvPool, KvSequence
from kvferry.engine.pacing import StepPacer
from kvferry.engine.sharing import PrefixShare
from kvferry.engine.speculation import Ask, Speculator
from kvferry.engine.token_rule import draw_token

__all__ = ["BatchEngine", "Counters", "Finish", "Job", "Room", "Scheduler", "StepOutput", "plan_rows"]

ROW_BUDGET: Final = 256
"""Rows of one step while nobody decodes: the kernels gain nothing beyond, and a stop takes effect between two steps."""

PREFILL_ROWS_BESIDE_DECODES: Final = 64
"""Prefill rows of a step that also decodes, for a scheduler without a clock; with one, its pacer measures."""

MAX_RUNNING: Final = 16
"""Jobs in one batch; the others wait in the queue."""

Room = Literal["free", "later", "never"]
"""What came of asking for memory: it is there, it comes when somebody else lets go of it, or there is none to be
had."""


class BatchEngine(Protocol):
    """What the scheduler needs of an engine."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence."""

    @property
    def pool(self) -> KvPool:
        """The memory that rows live in."""

    def forward(self, chunks: Sequence[Chunk]) -> list[NDArray[np.float32]]:
        """Append each chunk's rows to its sequence; return the logits each asked for, float32 [n, vocab]."""


@dataclass(slots=True)
class Scheduler:
    """Runs jobs to their ends, step by step. Not thread-safe: one thread calls everything, the one that owns the
    engine.

    `make_room(n_blocks)` is asked when the pool is short of that many blocks. When none can be had, the least important
    job is ended with OutOfKvMemory (of equals the one that came last), so that the others go on. `find_rows(job)` is
    asked before a job gets its place: a sequence that has more of its rows by now, and how many (whole blocks).
    `clock`, in seconds, lets a pacer choose how many prefill rows a step takes; `speculator` proposes tokens to jobs
    that decode while no prompt is computed. No bit depends on either.
    """

    engine: BatchEngine
    max_running: int = MAX_RUNNING
    row_budget: int = ROW_BUDGET
    prefill_rows_beside_decodes: int = PREFILL_ROWS_BESIDE_DECODES
    make_room: Callable[[int], Room] = lambda _: "never"
    find_rows: Callable[[Job], tuple[KvSequence, int] | None] = lambda _: None
    clock: Callable[[], float] | None = None
    pacer: StepPacer = field(default_factory=StepPacer)
    speculator: Speculator | None = None
    counters: Counters = field(default_factory=Counters)
    _queue: list[Running] = field(default_factory=list)  # by rank
    _running: list[Running] = field(default_factory=list)  # in order of admission
    _serials: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.row_budget:
            raise ValueError(f"max_running must be in [1, {self.row_budget}], not {self.max_running}")

    def __repr__(self) -> str:
        """One line that a test can compare with."""
        return f"<Scheduler {self.n_running} running, {self.n_queued} queued, {self.counters.n_steps} steps>"

    @property
    def n_running(self) -> int:
        """Jobs in the batch."""
        return len(self._running)

    @property
    def n_queued(self) -> int:
        """Jobs that wait for a place in the batch."""
        return len(self._queue)

    def submit(self, job: Job) -> None:
        """Queue a job; ValueError when it breaks the promise of `Job`."""
        n = len(job.token_ids)
        if not 1 <= job.n_prompt_tokens <= n or job.sequence.n_rows > job.n_rows_at_most or job.max_tokens < 1:
            raise ValueError(
                f"job {job.job_id}: {n} tokens of which {job.n_prompt_tokens} are prompt, "
                f"{job.sequence.n_rows} rows, max_tokens {job.max_tokens}"
            )
        n_more = max(job.max_tokens - (n - job.n_prompt_tokens), 0)
        tokens = np.empty(n + min(n_more, self.engine.context_length), dtype=np.int32)
        tokens[:n] = job.token_ids
        waiting = Running(
            job=job,
            serial=next(self._serials),
            tokens=tokens,
            n_tokens=n,
            n_first_tokens=n,
            n_first_rows=job.sequence.n_rows,
            share=PrefixShare(self.engine.pool.geometry.block_size),
        )
        insort(self._queue, waiting, key=lambda other: other.rank)

    def stop(self, job_id: str) -> bool:
        """End a job now; its sequence keeps its rows. False when it is not here."""
        for jobs in (self._running, self._queue):
            for running in jobs:
                if running.job.job_id == job_id:
                    self._leave(running, jobs)
                    return True
        return False

    def step(self) -> list[StepOutput]:
        """One mixed forward pass, or the first tokens of jobs that need none. Empty when nothing is to be done, or all
        jobs wait for memory."""
        outputs = self._admit() + self._end_complete_jobs()
        if first_tokens := self._draw_from_known_logits():
            return outputs + first_tokens
        batch, shed = self._secure_memory(self._plan())
        if batch:
            began_at = self.clock() if self.clock else 0.0
            n_decodes = sum(running.is_decoding for running, _ in batch)
            n_prefill_rows = sum(n for _, n in batch) - n_decodes
            # Nothing beside a prompt, nor in a step that it stands back from so that the pacer can measure the decodes.
            is_prompt_free = all(running.is_decoding for running in self._running)
            n_guessed = self._guess([running for running, _ in batch]) if is_prompt_free else 0
            logits = self.engine.forward([running.chunk(n) for running, n in batch])
            self.counters.n_steps += 1
            for (running, n), rows in zip(batch, logits, strict=True):
                outputs += self._advance(running, n, rows)
            if self.clock:
                self._learn(n_decodes, n_prefill_rows, n_guessed, self.clock() - began_at)
        return outputs + shed

    def _admit(self) -> list[StepOutput]:
        """Let jobs into the batch whose prompts have memory; the first one goes when it can never have it."""
        for waiting in list(self._queue):
            if len(self._running) >= self.max_running:
                break
            if self._waits_for_rows(waiting):
                continue
            room = self._reserve(waiting.sequence, waiting.n_tokens)
            if room == "never" and not self._running:
                self._leave(waiting, self._queue)
                return [out_of_memory(waiting)]
            if room != "free":
                break  # it waits for those that run to end, or for memory that is on its way
            self._queue.remove(waiting)
            self._running.append(waiting)
        return []

    def _waits_for_rows(self, waiting: Running) -> bool:
        """Take over the rows that exist by now; True when a running job is computing more of them."""
        is_waiting = waiting.share.take(waiting, self._running)
        if not is_waiting and waiting.n_ended_at_look != self.counters.n_jobs_ended:
            waiting.n_ended_at_look = self.counters.n_jobs_ended
            found = self.find_rows(waiting.job)
            if found is not None and found[1] > waiting.sequence.n_rows:
                waiting.sequence.adopt(*found)
        n_shared = waiting.sequence.n_rows - waiting.n_first_rows
        self.counters.n_rows_shared += n_shared - waiting.n_shared
        waiting.n_shared = n_shared
        return is_waiting

    def _leave(self, running: Running, jobs: list[Running]) -> None:
        jobs.remove(running)
        self.counters.n_jobs_ended += 1
        if self.speculator is not None:
            self.speculator.proposer.forget(running.serial)

    def _end_complete_jobs(self) -> list[StepOutput]:
        """Jobs whose answer was complete on arrival (a failover right after the last token)."""
        outputs = []
        for running in list(self._running):
            finish = running.finish_before(self.engine.context_length)
            if finish is not None:
                self._leave(running, self._running)
                outputs.append(
                    StepOutput(job_id=running.job.job_id, n_rows=0, n_shared=running.n_shared, finish=finish)
                )
        return outputs

    def _draw_from_known_logits(self) -> list[StepOutput]:
        """The first tokens of jobs whose rows are all there: they wait for nobody's forward pass."""
        return [
            self._draw(running, running.job.logits, 0)
            for running in list(self._running)
            if running.n_pending_rows == 0 and running.job.logits is not None
        ]

    def _plan(self) -> list[tuple[Running, int]]:
        rows = plan_rows(
            [r.n_pending_rows for r in self._running],
            [r.is_decoding for r in self._running],
            [r.priority for r in self._running],
            self._n_prefill_rows(sum(r.is_decoding for r in self._running)),
        )
        plan = [(running, n) for running, n in zip(self._running, rows, strict=True) if n]
        return sorted(plan, key=lambda entry: not entry[0].is_decoding)  # in the order that attention likes best

    def _n_prefill_rows(self, n_decodes: int) -> int:
        """Most rows that the next step computes for prompts."""
        most = max(self.row_budget - n_decodes, 1)
        if self.clock:
            return min(most, self.pacer.rows(n_decodes))
        return min(most, self.prefill_rows_beside_decodes) if n_decodes else most

    def _secure_memory(self, plan: list[tuple[Running, int]]) -> tuple[list[tuple[Running, int]], list[StepOutput]]:
        """The jobs of the plan that hold blocks for their rows, oldest first, and the one that had to go.

        Those that could have no blocks yet are left out and asked again at the next step.
        """
        batch: list[tuple[Running, int]] = []
        for running, n in plan:
            room = self._reserve(running.sequence, running.sequence.n_rows + n)
            if room == "free":
                batch.append((running, n))
            elif room == "never":
                least = max(self._running, key=lambda other: other.rank)
                self._leave(least, self._running)
                return [(other, n) for other, n in batch if other is not least], [out_of_memory(least)]
        return batch, []

    def _reserve(self, sequence: KvSequence, n_rows: int) -> Room:
        """Hold blocks for n_rows positions, asking for room when the pool has none."""
        for _ in range(2):
            try:
                sequence.reserve(n_rows)
            except OutOfKvMemory:
                room = self.make_room(sequence.n_missing_blocks(n_rows) - self.engine.pool.n_free_blocks)
                if room != "free":
                    return room
            else:
                return "free"
        return "later"  # another thread took what was made free

    def _guess(self, decoding: list[Running]) -> int:
        """Put proposals behind the tokens of jobs that decode; returns how many this step verifies."""
        if self.speculator is None:
            return 0
        asks = [
            Ask(r.serial, r.tokens[: r.n_tokens], r.n_tokens_to_come(self.engine.context_length) - 1, r.job.sampling)
            for r in decoding
        ]
        proposed, lengths = self.speculator.propose(asks, [running.guesses for running in decoding])
        for running, tokens, length in zip(decoding, proposed, lengths, strict=True):
            running.put_guesses(tokens, length if self._has_room(running, length) else 0)
        n_guessed = sum(running.n_guessed for running in decoding)
        self.counters.n_tokens_proposed += n_guessed
        return n_guessed

    def _has_room(self, running: Running, n_guesses: int) -> bool:
        """Hold blocks for proposals, unless they might be missed elsewhere."""
        n_missing = running.sequence.n_missing_blocks(running.n_tokens + n_guesses)
        if n_missing + self.n_running > self.engine.pool.n_free_blocks:
            return n_missing == 0
        return self._reserve(running.sequence, running.n_tokens + n_guesses) == "free"

    def _learn(self, n_decodes: int, n_prefill_rows: int, n_guessed: int, seconds: float) -> None:
        if self.speculator is not None and not n_prefill_rows:
            self.speculator.learn(n_decodes, n_guessed, seconds)
        if not n_guessed:
            self.pacer.learn(n_decodes, n_prefill_rows, seconds)

    def _advance(self, running: Running, n_rows: int, logits: NDArray[np.float32]) -> list[StepOutput]:
        """Draw the tokens whose logits were computed: one for the job's last row, and one more for each proposal as
        long as the one before was what was drawn."""
        self.counters.n_rows_prefilled += 0 if running.is_decoding else n_rows
        if running.n_pending_rows > 0:
            return [StepOutput(job_id=running.job.job_id, n_rows=n_rows, n_shared=running.n_shared)]
        guessed = running.take_guesses()
        outputs: list[StepOutput] = []
        n_right, was_wrong = 0, False
        for row in logits:
            output = self._draw(running, row, n_rows)
            outputs.append(output)
            if output.token is not None and n_right < len(guessed):
                was_wrong = output.token.token_id != guessed[n_right]
                n_right += not was_wrong
            if was_wrong or output.finish is not None or output.error is not None:
                break
        if len(guessed):
            running.guesses.learn(n_right, was_wrong=was_wrong)
        if len(logits) > 1:
            self.counters.n_tokens_accepted += n_right
            running.sequence.truncate(running.n_tokens - (outputs[-1].error is None))  # the rows of plain decoding
        return outputs

    def _draw(self, running: Running, logits: NDArray[np.float32], n_rows: int) -> StepOutput:
        """The job's next token, from one row of logits."""
        job, position, n_shared = running.job, running.n_tokens, running.n_shared
        try:
            token = draw_token(logits, running.tokens[:position], job.sampling, job.rule)
        except EngineError as error:  # no finite logit, or a rule too complex: the others are not to blame
            self._leave(running, self._running)
            return StepOutput(job_id=job.job_id, n_rows=n_rows, n_shared=n_shared, error=error)
        is_first = not running.is_decoding
        running.tokens[position] = token.token_id
        running.n_tokens += 1
        running.is_decoding = True
        self.counters.n_tokens_generated += 1
        finish = running.finish_before(self.engine.context_length)
        if finish is not None:
            self._leave(running, self._running)
        index = position - job.n_prompt_tokens
        return StepOutput(
            job_id=job.job_id,
            n_rows=n_rows,
            n_shared=n_shared,
            token=token,
            token_index=index,
            logits=logits if is_first else None,
            finish=finish,
        )
