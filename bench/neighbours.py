"""`make bench-neighbours`: how fast the engine is while a busy process holds each core, beside what it is alone.

The neighbours are pinned, at the engine's own priority, and end by themselves. "1 thread alone" may mean one thread
among the same neighbours, or one on an idle machine; both are printed. Each neighbour takes half of a core, so that two
threads among two neighbours have as much time as one thread on an idle machine, but not always at the same moment.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median
from typing import Final

import click
from rich.console import Console

from kvferry.bench.workload import Ours, Task, batch_task, decode_task, measure, prefill_task
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kv_cache import KvKind

TASKS: Final = (decode_task(0, 48), batch_task(8, 16), prefill_task(512))
FLOOR: Final = 0.7
_LONGEST_SECONDS: Final = 240
_NEIGHBOUR: Final = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.monotonic() + float(sys.argv[2])
print(flush=True)
while time.monotonic() < end: pass
"""


@contextmanager
def busy_neighbours(cores: set[int]) -> Iterator[None]:
    """A process on each core that never sleeps."""
    running = [
        subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, str(core), str(_LONGEST_SECONDS)], stdout=subprocess.PIPE)
        for core in cores
    ]
    try:
        for process in running:
            if process.stdout is not None:
                process.stdout.readline()  # it runs by now
        yield
    finally:
        for process in running:
            process.kill()
            process.communicate()


def speeds(engines: Sequence[Ours], task: Task, n_rounds: int) -> list[float]:
    """Tokens per second by the wall clock, of each engine; they take turns."""
    return [median(measured.wall) for (measured,) in measure([[engine] for engine in engines], task, n_rounds)]


@click.command()
@click.option("--model", default="smollm2-135m", help="A fetched name or a GGUF file.")
@click.option("--threads", default=2, type=click.IntRange(2), help="Beside one.")
@click.option("--rounds", default=7, type=click.IntRange(1))
def main(*, model: str, threads: int, rounds: int) -> None:
    """Decode, batches and prefill beside busy neighbours."""
    path = resolve_model(model)
    cores = os.sched_getaffinity(0)
    engines = [Ours(path, n, KvKind.F32) for n in (1, threads)]
    idle = [speeds(engines, task, rounds) for task in TASKS]
    with busy_neighbours(cores):
        busy = [speeds(engines, task, rounds) for task in TASKS]
    for engine in engines:
        engine.close()
    command = shlex.join(["python", "-m", "kvferry.bench.neighbours", *sys.argv[1:]])
    title = (
        f"{datetime.now(UTC):%Y-%m-%d}, `{command}`, {path.name}, a neighbour on each of {len(cores)} cores, "
        f"tokens per second, medians of {rounds} rounds."
    )
    lines = [
        title,
        "",
        f"| task | 1 thread idle | {threads} idle | 1 beside neighbours | {threads} beside | of 1 beside | of 1 idle |",
        "|" + " --- |" * 7,
    ]
    for task, (one, many), (one_busy, many_busy) in zip(TASKS, idle, busy, strict=True):
        figures = f"{one:.0f} | {many:.0f} | {one_busy:.0f} | {many_busy:.0f}"
        lines.append(f"| {task.name} | {figures} | {many_busy / one_busy:.2f} | {many_busy / one:.2f} |")
    Console(soft_wrap=True).print("\n".join(lines), markup=False)
    if busy[0][1] < FLOOR * busy[0][0]:
        sys.exit(f"decode is below {FLOOR} of one thread among the same neighbours")


if __name__ == "__main__":
    main()
