"""`make bench-engine`: our engine beside llama.cpp, in one run, on the same file and on its fastest quantisation.

The engines take turns, pair by pair, so that noise hits all. Figures are tokens per second; ratios are medians over the
pairs' own ratios, against the peer's better setting of flash attention. The machine's limits are measured beside:
reading in every round of a decode. Without llama.cpp only our figures are printed, and what to install.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Final

import click
from rich.console import Console

from kvferry.bench.engine_table import SAME_FILE, Clock, Judgement, Line, judged, markdown, quietness
from kvferry.bench.limits import GEMM_SHAPE, Limits, ReadProbe, gemm_ops, measure_limits
from kvferry.bench.llama_bench import PROGRAM, LlamaBench, quantised_by_tool
from kvferry.bench.peer import LlamaCpp, LlamaModel, PeerMissing, library, requantised
from kvferry.bench.shapes import SHAPES, shape_file
from kvferry.bench.workload import Ours, Runner, Task, Work, batch_task, decode_task, measure, prefill_task
from kvferry.engine.files.catalogue import KNOWN_MODELS
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kv_cache import KvKind

TASKS: Final = {
    **{f"prefill{n}": prefill_task(n) for n in (128, 512, 2048)},
    "decode0": decode_task(0, 64),
    "decode2048": decode_task(2048, 32),
    **{f"batch{n}": batch_task(n, 32) for n in (1, 2, 4, 8)},
}
# A model ten times as large: the same questions, fewer tokens.
LARGE_TASKS: Final = {
    **{f"prefill{n}": prefill_task(n) for n in (128, 512)},
    "decode0": decode_task(0, 16),
    "decode2048": decode_task(2048, 8),
    "batch8": batch_task(8, 4),
}
LARGE_DEFAULT: Final = ("prefill128", "decode0", "batch8")
QUICK: Final = ("prefill512", "decode0", "batch8")
GEMM_SHARE: Final = 0.45
READ_SHARE: Final = 0.8  # where the weights are larger than any cache
_CACHE_BYTES: Final = 300 << 20
_READING: Final = "read bandwidth"
_JUDGED_FILE: Final = KNOWN_MODELS["smollm2-135m"].file_name

MakeRunners = Callable[[int], dict[str, list[Runner]]]


@dataclass(frozen=True)
class Bench:
    """What all tables share."""

    path: Path
    kv: KvKind
    pairs: int
    clock: Clock
    probe: ReadProbe
    work: Work

    def table(
        self, tasks: Sequence[Task], n_threads: int, make_peers: MakeRunners
    ) -> tuple[list[str], list[Judgement]]:
        """Run all tasks with so many threads; the text of the table, and what is judged of it."""
        limits = measure_limits(self.probe, n_threads)
        ours, peers = Ours(self.path, n_threads, self.kv), make_peers(n_threads)
        lines = [self._line(task, ours, peers, limits) for task in tasks]
        judgements = judged(lines, n_threads, self.clock) if self.path.name == _JUDGED_FILE else []
        if self.work.weight_bytes > _CACHE_BYTES:
            judgements += [
                Judgement(f"{line.task}, {n_threads} thread(s), share of read bandwidth", READ_SHARE, line.share)
                for line in lines
                if line.limit == _READING and line.share is not None
            ]
        text = [self._heading(lines, ours, limits), "", *markdown(lines, list(peers), self.clock), ""]
        for runner in [ours, *(runner for group in peers.values() for runner in group)]:
            runner.close()
        return text, judgements

    def _heading(self, lines: Sequence[Line], ours: Ours, limits: Limits) -> str:
        return (
            f"{limits.n_threads} thread(s), {'wall clock' if self.clock == 'wall' else 'processor time'}; ours had a "
            f"processor {quietness(lines, limits.n_threads):.0%} of the time. At most {limits.read_bytes / 1e9:.1f} "
            f"GB/s read, {limits.integer_ops / 1e9:.0f} G integer and {limits.float_ops / 1e9:.0f} G float operations "
            f"per second ({ours.engine.kernel_path}, KV rows {self.kv})."
        )

    def _line(self, task: Task, ours: Ours, peers: dict[str, list[Runner]], limits: Limits) -> Line:
        able = {label: group for label, group in peers.items() if all(runner.can(task) for runner in group)}
        bandwidths: list[float] = []

        def read() -> None:
            bandwidths.append(self.probe.measure(limits.n_threads))

        groups: list[list[Runner]] = [[ours], *able.values()]
        results = measure(groups, task, self.pairs, read if task.kind == "decode" else None)
        [mine], *theirs = results
        best = {
            label: max(group, key=lambda measured: median(getattr(measured, self.clock)))
            for label, group in zip(able, theirs, strict=True)
        }
        speeds = getattr(mine, self.clock)
        if task.kind == "prefill":
            share = 2 * self.work.products * median(speeds) / limits.integer_ops
            return Line(task.name, mine, best, share, "the integer peak")
        if task.kind == "batch":
            return Line(task.name, mine, best)
        row_bytes = ours.engine.geometry.block_bytes / ours.engine.geometry.block_size
        n_bytes = self.work.weight_bytes + row_bytes * (task.depth + task.n_tokens / 2)
        share = median(n_bytes * speed / read for speed, read in zip(speeds, bandwidths[1:], strict=True))
        return Line(task.name, mine, best, share, _READING)


def find_peers(path: Path, quants: Sequence[str], flash: str) -> tuple[MakeRunners, Callable[[], None]]:
    """What makes the peer's runners for a number of threads, by file, and what frees its models. Raises PeerMissing."""
    settings = {"both": (False, True), "on": (True,), "off": (False,)}[flash]
    try:
        library()
    except PeerMissing:
        if shutil.which(PROGRAM) is None:
            raise
        files = {SAME_FILE: path, **{quant: quantised_by_tool(path, quant) for quant in quants}}

        def by_tool(n_threads: int) -> dict[str, list[Runner]]:
            return {
                label: [LlamaBench(file, label, n_threads, flash=setting) for setting in settings]
                for label, file in files.items()
            }

        return by_tool, lambda: None
    models = [LlamaModel(path, SAME_FILE), *(LlamaModel(requantised(path, quant), quant) for quant in quants)]

    def by_library(n_threads: int) -> dict[str, list[Runner]]:
        return {model.label: [LlamaCpp(model, n_threads, flash=setting) for setting in settings] for model in models}

    def free() -> None:
        for model in models:
            model.close()

    return by_library, free


def gemm_judgement(integer_ops: float) -> tuple[str, Judgement]:
    """A q4 linear layer of many tokens by itself, one thread."""
    n_tokens, n_outputs, n_inputs = GEMM_SHAPE
    speed = gemm_ops()
    share = speed / integer_ops
    text = (
        f"A q4 linear layer, {n_outputs} x {n_inputs} for {n_tokens} tokens, one thread: {speed / 1e9:.0f} G "
        f"operations per second, {share:.0%} of the integer peak."
    )
    return text, Judgement("q4 GEMM, share of the integer peak", GEMM_SHARE, share)


@click.command()
@click.option(
    "--model", default="smollm2-135m", help=f"A fetched name, a GGUF file, or a made-up one: {', '.join(SHAPES)}."
)
@click.option("--threads", multiple=True, type=click.IntRange(1), help="Give it once for each table. Default: 1 and 2.")
@click.option("--pairs", type=click.IntRange(1), help="Default: 5.")
@click.option("--task", "names", multiple=True, type=click.Choice(list(TASKS)), help="Default: all.")
@click.option("--quant", "quants", multiple=True, default=("q4_0",), type=click.Choice(["q4_0", "q8_0"]))
@click.option("--flash", default="both", type=click.Choice(["both", "on", "off"]), help="Settings the peer may use.")
@click.option("--kv", default="f32", type=click.Choice([kind.value for kind in KvKind]))
@click.option("--quick", is_flag=True, help=f"One thread, 3 pairs, {', '.join(QUICK)}: about two minutes.")
@click.option("--processor-time", is_flag=True, help="Instead of the wall clock, on a machine busy with other work.")
@click.option("--markdown", "target", type=click.Path(path_type=Path), help="Append the tables to this file.")
@click.option("--floor", default=0.0, help="Exit with 1 when a judged figure is below this part of what is asked.")
def main(
    *,
    model: str,
    threads: Sequence[int],
    pairs: int | None,
    names: Sequence[str],
    quants: Sequence[str],
    flash: str,
    kv: str,
    quick: bool,
    processor_time: bool,
    target: Path | None,
    floor: float,
) -> None:
    """Prefill, decode and batches beside llama.cpp."""
    began_at = time.monotonic()
    console = Console(soft_wrap=True)
    path = shape_file(model) if model in SHAPES else resolve_model(model)
    known = LARGE_TASKS if model in SHAPES else TASKS
    names = names or (QUICK if quick else LARGE_DEFAULT if model in SHAPES else tuple(TASKS))
    pairs = pairs or (3 if quick else 5)
    clock: Clock = "cpu" if processor_time else "wall"
    bench = Bench(path, KvKind(kv), pairs, clock, ReadProbe(), Work.of(path))
    free: Callable[[], None] = lambda: None  # noqa: E731 - the same name as what frees the peers
    try:
        make_peers, free = find_peers(path, quants, flash)
    except PeerMissing as error:
        console.print(str(error), markup=False)
        make_peers = lambda _: {}  # noqa: E731 - the same
    command = shlex.join(["python", "-m", "kvferry.bench.engine", *sys.argv[1:]])
    text = [f"{datetime.now(UTC):%Y-%m-%d}, `{command}`, {path.name}, medians of {pairs} interleaved pairs.", ""]
    judgements: list[Judgement] = []
    for n_threads in dict.fromkeys(threads or ((1,) if quick else (1, 2))):
        lines, found = bench.table([known[name] for name in names if name in known], n_threads, make_peers)
        text += lines
        judgements += found
    told, judgement = gemm_judgement(measure_limits(bench.probe).integer_ops)
    text += [told, "", *(f"- {judgement}" for judgement in [*judgements, judgement]), ""]
    minutes, seconds = divmod(round(time.monotonic() - began_at), 60)
    text += [f"Took {minutes} min {seconds} s; load average at the end {os.getloadavg()[0]:.1f}.", ""]
    free()
    console.print("\n".join(text), markup=False)
    if target is not None:
        with target.open("a") as file:
            file.write("\n".join(text))
    below = [judgement for judgement in [*judgements, judgement] if judgement.found < floor * judgement.asked]
    if below:
        console.print(f"below {floor:g} of what is asked: {len(below)} figures")
        sys.exit(1)


if __name__ == "__main__":
    main()
