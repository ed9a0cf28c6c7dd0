"""Speculation on the demo model: tokens per second with and without, the answers compared token for token.

    python -m kvferry.bench.speculation [--model M] [--threads N] [--rounds N] [--sessions N]

Judged (issue 4): on a repetitive text at least 1.5 x plain decoding. The two take turns, so that noise hits both.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.sampling import SamplingSettings, warm_up
from kvferry.engine.scheduler import Job, Scheduler
from kvferry.engine.speculation import PromptLookup, Speculator
from kvferry.engine.text.model import TextModel

_LINE: Final = "The ship Aurora left port at dawn with twelve sailors, nine barrels of water and a cargo of salt.\n"
TEXTS: Final = {
    "repetitive": "Copy this text again and again:\n" + _LINE * 6,
    "free": "Once upon a time, there was a",
}
N_TOKENS: Final = 160


def answer(
    engine: Engine, prompt: list[int], temperature: float, n_sessions: int, *, speculate: bool
) -> tuple[list[list[int]], float, Scheduler]:
    """The tokens of each session, the seconds that all but their first ones took, and what ran them."""
    speculator = Speculator(PromptLookup()) if speculate else None
    scheduler = Scheduler(engine, clock=time.perf_counter, speculator=speculator)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(n_sessions)}
    sequences = [engine.new_sequence() for _ in tokens]
    for name, sequence in zip(tokens, sequences, strict=True):
        sampling = SamplingSettings(temperature=temperature, seed=int(name))
        job = Job(
            job_id=name,
            sequence=sequence,
            token_ids=np.array(prompt, np.int32),
            n_prompt_tokens=len(prompt),
            sampling=sampling,
            max_tokens=N_TOKENS,
            end_token_ids=(),
        )
        scheduler.submit(job)
    began_at = time.perf_counter()
    while scheduler.n_running + scheduler.n_queued:
        are_under_way = all(tokens.values())
        outputs = scheduler.step()
        for output in outputs:
            if output.token is not None:
                tokens[output.job_id].append(output.token.token_id)
        if not are_under_way:
            began_at = time.perf_counter()
    seconds = time.perf_counter() - began_at
    for sequence in sequences:
        sequence.release()
    return list(tokens.values()), seconds, scheduler


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--threads", type=int, default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--sessions", default=1, show_default=True)
def main(model: str, threads: int, rounds: int, sessions: int) -> None:
    """Print what prompt lookup gains; exit with 1 when an answer differs."""
    path = resolve_model(model)
    engine = Engine.load(path, EngineOptions(n_threads=threads, kv_bytes=1 << 30))
    warm_up(engine.config.vocab_size)
    text = TextModel.load(path)
    title = f"{model}, {engine.kernel_path}, {threads} threads, {sessions} sessions, medians of {rounds} rounds"
    table = Table(
        "text", "temperature", "plain tok/s", "n-gram tok/s", "ratio", "proposed", "right", "same", title=title
    )
    n_different = 0
    for name, prompt in TEXTS.items():
        for temperature in (0.0, 0.8):
            speeds: list[tuple[float, float]] = []
            for _ in range(rounds):
                plain, plain_seconds, _ = answer(engine, text.encode(prompt), temperature, sessions, speculate=False)
                guessed, seconds, scheduler = answer(engine, text.encode(prompt), temperature, sessions, speculate=True)
                n_different += plain != guessed
                n_tokens = sessions * (N_TOKENS - 1)
                speeds.append((n_tokens / plain_seconds, n_tokens / seconds))
            before, after = (statistics.median(speed) for speed in zip(*speeds, strict=True))
            ratio = statistics.median(b / a for a, b in speeds)
            counters = scheduler.counters
            table.add_row(
                name,
                f"{temperature:g}",
                f"{before:.0f}",
                f"{after:.0f}",
                f"{ratio:.2f} x",
                str(counters.n_tokens_proposed),
                str(counters.n_tokens_accepted),
                "yes" if not n_different else "NO",
            )
    Console().print(table)
    engine.close()
    sys.exit(1 if n_different else 0)


if __name__ == "__main__":
    main()
