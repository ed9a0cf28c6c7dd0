"""Continuous batching on the demo model: what running sessions feel of a long prompt, and what the prompt pays.

    python -m kvferry.bench.serving [--model M] [--threads N] [--kv KIND] [--rounds N] [--ratio R] [--processor-time]

Judged (issue 3): time between tokens of four running sessions while a 4,000-token prompt is prefilled, p99 <= 2.5 x
undisturbed; the prefill slowed <= 1.5 x. The three measurements take turns, so that noise of the machine hits all. On a
machine that is busy with other work `--processor-time` counts what the engine's one thread used instead of the wall.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from kvferry.engine.batch import pass_rows, tile_rows
from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.pacing import TARGET_RATIO, StepPacer
from kvferry.engine.sampling import SamplingSettings, warm_up
from kvferry.engine.scheduler import Job, Scheduler

N_SESSIONS: Final = 4
N_SESSION_TOKENS: Final = 200
N_PROMPT_TOKENS: Final = 4000
N_UNDISTURBED_STEPS: Final = 50
BATCHES: Final = (1, 2, 4, 8)

_ids = count()


@dataclass
class Result:
    """Seconds of all rounds: per step, but for the prefills, which are whole prompts."""

    undisturbed: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    prefill_alone: list[float] = field(default_factory=list)
    prefill_beside: list[float] = field(default_factory=list)


def _job(engine: Engine, n_tokens: int, max_tokens: int) -> Job:
    """A prompt of random tokens that shares its beginning with nobody's."""
    number = next(_ids)
    tokens = np.random.default_rng(number).integers(3, engine.config.vocab_size, n_tokens).astype(np.int32)
    return Job(
        job_id=str(number),
        sequence=engine.new_sequence(),
        token_ids=tokens,
        n_prompt_tokens=n_tokens,
        sampling=SamplingSettings(),
        max_tokens=max_tokens,
        end_token_ids=(),
    )


class _Bench:
    """Measures with one engine and one clock."""

    def __init__(self, engine: Engine, clock: Callable[[], float], ratio: float) -> None:
        self._engine = engine
        self._clock = clock
        self._ratio = ratio

    def scheduler(self) -> Scheduler:
        """Without any job."""
        return Scheduler(self._engine, clock=self._clock, pacer=self._pacer())

    def _pacer(self) -> StepPacer:
        config = self._engine.config
        return StepPacer(target_ratio=self._ratio, tile_rows=tile_rows(config), pass_rows=pass_rows(config))

    def measure(self, n_rounds: int) -> Result:
        """All three, round by round."""
        result = Result()
        for _ in range(n_rounds):
            scheduler = self.scheduler()
            sessions = self._run_sessions(scheduler, N_SESSIONS)
            result.undisturbed += [self._step(scheduler)[0] for _ in range(N_UNDISTURBED_STEPS)]
            gaps = self._prefill(scheduler)
            result.undisturbed += [self._step(scheduler)[0] for _ in range(N_UNDISTURBED_STEPS)]  # they are longer now
            result.beside += gaps
            result.prefill_beside.append(sum(gaps))
            for job in sessions:
                scheduler.stop(job.job_id)
                job.sequence.release()
            result.prefill_alone.append(sum(self._prefill(self.scheduler())))
        return result

    def decode_step(self, n_sessions: int) -> float:
        """Median seconds of a step that decodes so many sessions."""
        scheduler = self.scheduler()
        sessions = self._run_sessions(scheduler, n_sessions)
        seconds = [self._step(scheduler)[0] for _ in range(40)]
        for job in sessions:
            job.sequence.release()
        return statistics.median(seconds)

    def _run_sessions(self, scheduler: Scheduler, n: int) -> list[Job]:
        """Sessions that all decode."""
        sessions = [_job(self._engine, N_SESSION_TOKENS, 1 << 20) for _ in range(n)]
        for job in sessions:
            scheduler.submit(job)
        while self._step(scheduler)[1] < n:
            pass
        return sessions

    def _prefill(self, scheduler: Scheduler) -> list[float]:
        """Seconds of every step until a long prompt has its first token; then it is stopped."""
        job = _job(self._engine, N_PROMPT_TOKENS, 2)
        scheduler.submit(job)
        seconds: list[float] = []
        while job.sequence.n_rows < N_PROMPT_TOKENS:
            seconds.append(self._step(scheduler)[0])
        scheduler.stop(job.job_id)
        job.sequence.release()
        return seconds

    def _step(self, scheduler: Scheduler) -> tuple[float, int]:
        """Seconds, and how many tokens were drawn."""
        began_at = self._clock()
        outputs = scheduler.step()
        return self._clock() - began_at, sum(output.token is not None for output in outputs)


def _percentiles(seconds: list[float]) -> list[float]:
    return [float(np.percentile(seconds, p)) for p in (50, 99)]


def _report(result: Result, ratio: float) -> Table:
    table = Table("", "p50 ms", "p99 ms", title=f"{N_SESSIONS} sessions and a {N_PROMPT_TOKENS}-token prompt")
    undisturbed, beside = _percentiles(result.undisturbed), _percentiles(result.beside)
    for name, values in (("between tokens, undisturbed", undisturbed), ("between tokens, beside it", beside)):
        table.add_row(name, *(f"{1000 * value:.1f}" for value in values))
    ratios = [b / u for b, u in zip(beside, undisturbed, strict=True)]
    table.add_row(f"ratio (judged: p99 <= 2.5; set: {ratio:g})", *(f"{value:.2f} x" for value in ratios))
    table.add_row("p99 to the undisturbed median", "", f"{beside[1] / undisturbed[0]:.2f} x")
    alone, together = statistics.median(result.prefill_alone), statistics.median(result.prefill_beside)
    table.add_row("prefill alone", f"{alone:.2f} s", f"{N_PROMPT_TOKENS / alone:.0f} tok/s")
    table.add_row("prefill beside the sessions", f"{together:.2f} s", f"{N_PROMPT_TOKENS / together:.0f} tok/s")
    table.add_row("ratio (judged: <= 1.5)", f"{together / alone:.2f} x", "")
    n_tokens = N_SESSIONS * len(result.beside) / len(result.prefill_beside)
    table.add_row("tokens drawn meanwhile", f"{n_tokens:.0f}", f"{n_tokens / together:.0f} tok/s")
    return table


def _batches(bench: _Bench) -> Table:
    """A batch reads the weights once: its step takes far less than that of one session for each."""
    table = Table("sessions", "ms a step", "tok/s", "steps of one session", title="decode, all sessions together")
    steps = {n: bench.decode_step(n) for n in BATCHES}
    for n, seconds in steps.items():
        table.add_row(str(n), f"{1000 * seconds:.2f}", f"{n / seconds:.0f}", f"{seconds / steps[1]:.2f} x")
    return table


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--threads", type=int, default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--kv", type=click.Choice([kind.value for kind in KvKind]), default="f32", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--ratio", "ratios", type=float, multiple=True, default=(TARGET_RATIO,), show_default=True)
@click.option("--processor-time", is_flag=True, help="Of one thread, for a machine that is busy with other work.")
def main(model: str, threads: int, kv: str, rounds: int, ratios: tuple[float, ...], processor_time: bool) -> None:
    """Print the time between tokens beside a long prompt, and what the prompt pays for it."""
    threads = 1 if processor_time else threads
    engine = Engine.load(resolve_model(model), EngineOptions(n_threads=threads, kv_bytes=1 << 30, kv=KvKind(kv)))
    warm_up(engine.config.vocab_size)
    console = Console()
    measured = "processor" if processor_time else "wall"
    console.print(f"{model}, {engine.kernel_path}, {threads} threads, KV {kv}, {measured} time")
    clock = time.thread_time if processor_time else time.perf_counter
    for ratio in ratios:
        console.print(_report(_Bench(engine, clock, ratio).measure(rounds), ratio))
    console.print(_batches(_Bench(engine, clock, ratios[0])))
    engine.close()


if __name__ == "__main__":
    main()
