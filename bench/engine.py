"""`make bench-engine`: our engine beside llama.cpp, in one run, on the same file.

The two take turns, pair by pair, so that noise hits both. The metric is tokens per second, by the wall clock and, with
one thread, per CPU-second of the computing thread, which a busy machine disturbs less. Ratios are medians over the
pairs' own ratios. Without llama-cpp-python only our figures are printed, and what to install.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.files.resolve import resolve_model

CONTEXT: Final = 2048
KV_BYTES: Final = 512 << 20
INSTALL_HINT: Final = "llama.cpp is not here to compare with; install the peer: pip install 'kvferry[bench]'"


class Runner(Protocol):
    """One of the two engines. Each call starts from an empty sequence."""

    name: str

    def prefill(self, tokens: list[int]) -> None:
        """One pass over the tokens, logits of the last."""

    def decode(self, tokens: list[int]) -> None:
        """One token after the other."""


class Ours:
    name = "kvferry"

    def __init__(self, path: Path, n_threads: int) -> None:
        self._engine = Engine.load(path, EngineOptions(n_threads=n_threads, kv_bytes=KV_BYTES, context_length=CONTEXT))
        self.kernel_path = self._engine.kernel_path

    def prefill(self, tokens: list[int]) -> None:
        self._run(np.array(tokens, np.int32)[None])

    def decode(self, tokens: list[int]) -> None:
        self._run(np.array(tokens, np.int32)[:, None])

    def _run(self, steps: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        sequence = self._engine.new_sequence()
        for step in steps:
            self._engine.forward([Chunk(sequence, step)])
        sequence.release()


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, path: Path, n_threads: int) -> None:
        llama_cpp: Any = importlib.import_module("llama_cpp")
        self._model = llama_cpp.Llama(
            str(path),
            n_ctx=CONTEXT,
            n_batch=512,
            n_ubatch=512,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            verbose=False,
        )

    def prefill(self, tokens: list[int]) -> None:
        self._model.reset()
        self._model.eval(tokens)

    def decode(self, tokens: list[int]) -> None:
        self._model.reset()
        for token in tokens:
            self._model.eval([token])


@dataclass
class Measured:
    """Tokens per second of each run of one task by one engine."""

    wall: list[float]
    cpu: list[float]

    def add(self, run: Callable[[list[int]], None], tokens: list[int]) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        run(tokens)
        self.wall.append(len(tokens) / (time.perf_counter() - wall))
        self.cpu.append(len(tokens) / (time.thread_time() - cpu))


def measure(runners: list[Runner], task: str, n_tokens: int, n_pairs: int) -> list[Measured]:
    """Let the runners take turns; the first round warms up and does not count."""
    tokens = [100 + 7 * i % 40_000 for i in range(n_tokens)]
    results = [Measured([], []) for _ in runners]
    for pair in range(n_pairs + 1):
        for runner, result in zip(runners, results, strict=True):
            into = Measured([], []) if pair == 0 else result
            into.add(getattr(runner, task), tokens)
    return results


def ratio(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


@click.command()
@click.option("--model", default="smollm2-135m", help="A fetched name or a GGUF file.")
@click.option("--threads", default=1, type=click.IntRange(1))
@click.option("--pairs", default=5, type=click.IntRange(1))
@click.option("--prompt", default=512, type=click.IntRange(1, CONTEXT), help="Tokens of the prefill.")
@click.option("--decode", default=128, type=click.IntRange(1, CONTEXT), help="Tokens decoded one by one.")
@click.option("--floor", default=1.0, help="Exit with 1 when a ratio to the peer is below this.")
def main(*, model: str, threads: int, pairs: int, prompt: int, decode: int, floor: float) -> None:
    """Prefill and decode beside llama.cpp."""
    path = resolve_model(model)
    ours = Ours(path, threads)
    runners: list[Runner] = [ours]
    console = Console()
    try:
        runners.append(LlamaCpp(path, threads))
    except ImportError:
        console.print(INSTALL_HINT)
    unit = "tokens per CPU-second" if threads == 1 else "tokens per second"
    table = Table(title=f"{path.name}, {threads} thread(s), {ours.kernel_path}, median of {pairs} interleaved runs")
    for heading in ("task", *(f"{r.name}: {unit} (wall)" for r in runners), "ratio", "ratio (wall)"):
        table.add_column(heading, justify="right")
    ratios = []
    for task, n_tokens in (("prefill", prompt), ("decode", decode)):
        results = measure(runners, task, n_tokens, pairs)
        figures = [r.cpu if threads == 1 else r.wall for r in results]
        cells = [f"{median(f):.0f} ({median(r.wall):.0f})" for f, r in zip(figures, results, strict=True)]
        if len(results) == 2:
            ratios.append(ratio(figures[0], figures[1]))
            cells += [f"{ratios[-1]:.2f}", f"{ratio(results[0].wall, results[1].wall):.2f}"]
        table.add_row(f"{task} {n_tokens}", *cells)
    console.print(table)
    if any(value < floor for value in ratios):
        console.print(f"below the floor of {floor} times the peer")
        sys.exit(1)


if __name__ == "__main__":
    main()
