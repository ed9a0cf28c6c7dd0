"""What the scheduler keeps of each answer that is being generated, and how a step's rows are shared out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.engine import Chunk
from kvferry.engine.errors import EngineError, OutOfKvMemory
from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.sampling import SampledToken, SamplingSettings
from kvferry.engine.sharing import PrefixShare
from kvferry.engine.speculation import Guesses
from kvferry.engine.token_rule import TokenRule
from kvferry.engine.vision.placed import Images
from kvferry.engine.vision.sight import SeenPrompt

Finish = Literal["end", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer to be generated.

    `sequence` holds the rows of a prefix of `token_ids`, at most all but one of them, and belongs to the scheduler
    until the job ends. It may hold all of them when `logits` are those of the last one: then nothing is computed before
    the first token. `token_ids` are the prompt's `n_prompt_tokens` and then the answer tokens that exist already;
    `max_tokens` counts those too. Jobs of a higher `priority` go first, and among equals those that arrived earlier, by
    any measure of `arrival`. `seen`: of a sequence with images, with the features of those whose rows are not there.
    `rule` has been told the answer tokens that exist already. Only jobs of one `namespace` share rows.
    """

    job_id: str
    sequence: KvSequence
    token_ids: Sequence[int] | NDArray[np.int32]
    n_prompt_tokens: int
    sampling: SamplingSettings
    max_tokens: int
    end_token_ids: Collection[int]
    priority: int = 0
    arrival: int = 0
    seen: SeenPrompt | None = None
    rule: TokenRule | None = None
    logits: NDArray[np.float32] | None = None  # [vocab]
    namespace: str = ""

    @property
    def n_rows_at_most(self) -> int:
        """Rows that may be there already."""
        return len(self.token_ids) - (self.logits is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step did for one job. With `finish` or `error` set, the job has left the scheduler.

    `logits` are those that the job's first token was drawn from, float32 [vocab]: of the last token it came with.
    """

    job_id: str
    n_rows: int  # rows computed in this step
    n_shared: int = 0  # rows taken over from others since it was submitted
    token: SampledToken | None = None
    token_index: int = 0  # of `token` in the answer, from 0
    logits: NDArray[np.float32] | None = None
    finish: Finish | None = None
    error: EngineError | None = None


@dataclass(slots=True)
class Running:
    """A job in the scheduler."""

    job: Job
    serial: int
    tokens: NDArray[np.int32]  # [capacity]: the first n_tokens are the sequence so far
    n_tokens: int
    n_first_tokens: int  # it came with
    n_first_rows: int
    share: PrefixShare
    is_decoding: bool = False
    n_shared: int = 0
    n_ended_at_look: int = -1  # jobs that had ended when it last looked for rows outside
    n_proposed: int = 0  # tokens behind the first n_tokens that are guessed to come next
    n_guessed: int = 0  # how many of them the next step verifies
    guesses: Guesses = field(default_factory=Guesses)

    @property
    def sequence(self) -> KvSequence:
        return self.job.sequence

    @property
    def priority(self) -> int:
        return self.job.priority

    @property
    def first_tokens(self) -> NDArray[np.int32]:
        return self.tokens[: self.n_first_tokens]

    @property
    def images(self) -> Images:
        return () if self.job.seen is None else self.job.seen.images

    @property
    def namespace(self) -> str:
        return self.job.namespace

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of the queue."""
        return -self.job.priority, self.job.arrival, self.serial

    @property
    def n_pending_rows(self) -> int:
        return self.n_tokens - self.job.sequence.n_rows

    def finish_before(self, context_length: int) -> Finish | None:
        """Why no further token is due, or None."""
        n_answer = self.n_tokens - self.job.n_prompt_tokens
        if n_answer > 0 and int(self.tokens[self.n_tokens - 1]) in self.job.end_token_ids:
            return "end"
        return "length" if n_answer >= self.job.max_tokens or self.n_tokens >= context_length else None

    def n_tokens_to_come(self, context_length: int) -> int:
        """How many more tokens the answer may have."""
        return min(self.job.max_tokens + self.job.n_prompt_tokens, context_length) - self.n_tokens

    def put_guesses(self, tokens: NDArray[np.int32], n_guessed: int) -> None:
        """Enter what may come next; the first ``n_guessed`` are to be verified."""
        self.n_proposed, self.n_guessed = len(tokens), n_guessed
        self.tokens[self.n_tokens : self.n_tokens + len(tokens)] = tokens

    def take_guesses(self) -> list[int]:
        """What was entered, as far as it can be compared with what is drawn."""
        n = max(self.n_guessed, min(self.n_proposed, 1))
        self.n_proposed = self.n_guessed = 0
        return [int(token) for token in self.tokens[self.n_tokens : self.n_tokens + n]]

    def chunk(self, n_rows: int) -> Chunk:
        """Its next rows, and those of its proposals."""
        start, seen = self.sequence.n_rows, self.job.seen
        stop = start + n_rows + self.n_guessed
        logits: Literal["none", "last", "all"] = "last" if start + n_rows == self.n_tokens else "none"
        return Chunk(
            sequence=self.sequence,
            token_ids=self.tokens[start:stop],
            logits="all" if self.n_guessed else logits,
            sight=None if seen is None else seen.sight(start, stop),
        )


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    n_steps: int = 0
    n_rows_prefilled: int = 0
    n_tokens_generated: int = 0
    n_rows_shared: int = 0
    n_jobs_ended: int = 0
    n_tokens_proposed: int = 0
    n_tokens_accepted: int = 0  # of those


def plan_rows(
    pending: Sequence[int], is_decoding: Sequence[bool], priorities: Sequence[int], n_prefill_rows: int
) -> list[int]:
    """Rows of the next step for each job: one for every decode, and n_prefill_rows shared among the prefills.

    `pending[i]` (>= 1) is what job i still lacks. The highest priority takes what it wants first. Within one the plan
    is max-min fair: no prefill gets more while another that wants more has less.
    """
    rows = [1 if decoding else 0 for decoding in is_decoding]
    left = n_prefill_rows
    for priority in sorted(set(priorities), reverse=True):
        prefills = sorted((n, i) for i, n in enumerate(pending) if not is_decoding[i] and priorities[i] == priority)
        for rank, (n, i) in enumerate(prefills):
            rows[i] = min(n, -(-left // (len(prefills) - rank)))
            left -= rows[i]
    return rows


def out_of_memory(running: Running) -> StepOutput:
    """What a job hears that had to go."""
    error = OutOfKvMemory(
        f"no key/value memory is left for this turn at {running.n_tokens} tokens beside the others; "
        "try another node, or give this one more --kv-memory"
    )
    return StepOutput(job_id=running.job.job_id, n_rows=0, n_shared=running.n_shared, error=error)
