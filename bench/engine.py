"""`make bench-engine`: our engine beside llama.cpp, in one run, on the same file and on its fastest quantisation.

The engines take turns, pair by pair, so that noise hits all. Each figure is tokens per second of processor time (with
one thread that is speed without the neighbours' share) and, in brackets, by the wall clock. Ratios are medians over the
pairs' own ratios, against the peer's better setting of flash attention. Without llama-cpp-python only our figures are
printed, and what to install.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import click
from rich.console import Console

from kvferry.bench.limits import Limits, measure_limits
from kvferry.bench.peer import LlamaCpp, PeerMissing, requantised
from kvferry.bench.workload import (
    Measured,
    Ours,
    Runner,
    Task,
    batch_task,
    decode_task,
    measure,
    prefill_task,
    products_per_token,
    ratio,
    weight_bytes_per_token,
)
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kv_cache import KvKind

TASKS = {
    **{f"prefill{n}": prefill_task(n) for n in (128, 512, 2048)},
    "decode0": decode_task(0, 64),
    "decode2048": decode_task(2048, 32),
    **{f"batch{n}": batch_task(n, 32) for n in (1, 2, 4, 8)},
}


@dataclass(frozen=True)
class Line:
    """One task: our figures, and for each peer file the figures of its better flash-attention setting."""

    task: str
    ours: Measured
    peers: dict[str, Measured]


def run_task(task: Task, ours: Ours, peers: dict[str, list[LlamaCpp]], n_pairs: int) -> Line:
    """``peers``: by file, one runner per setting."""
    runners: list[Runner] = [ours, *(runner for settings in peers.values() for runner in settings)]
    results = measure(runners, task, n_pairs)
    best: dict[str, Measured] = {}
    rest = iter(results[1:])
    for label, settings in peers.items():
        best[label] = max((next(rest) for _ in settings), key=lambda measured: median(measured.cpu))
    return Line(task.name, results[0], best)


def markdown(lines: Sequence[Line], labels: Sequence[str], *, is_wall: bool) -> list[str]:
    """The table, ready for BENCHMARKS.md. ``is_wall``: which ratio is shown."""

    def figures(measured: Measured) -> str:
        return f"{median(measured.cpu):.0f} ({median(measured.wall):.0f})"

    heading = ["task", "kvferry", *(text for label in labels for text in (f"llama.cpp {label}", "ratio"))]
    rows = ["| " + " | ".join(heading) + " |", "|" + " --- |" * len(heading)]
    for line in lines:
        cells = [line.task, figures(line.ours)]
        for label in labels:
            theirs = line.peers[label]
            pair = (line.ours.wall, theirs.wall) if is_wall else (line.ours.cpu, theirs.cpu)
            cells += [figures(theirs), f"{ratio(*pair):.2f}"]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def shares(lines: Sequence[Line], ours: Ours, limits: Limits) -> list[str]:
    """The machine's limits, and how much of them one thread of ours uses."""
    limit = (
        f"One thread reads {limits.read_bytes / 1e9:.1f} GB/s and computes {limits.integer_ops / 1e9:.0f} G integer "
        f"and {limits.float_ops / 1e9:.0f} G float operations per second at most ({ours.engine.kernel_path})."
    )
    found = [limit]
    by_name = {line.task: median(line.ours.cpu) for line in lines}
    for name, speed in by_name.items():
        if name == "decode at depth 0":
            share = weight_bytes_per_token(ours.engine) * speed / limits.read_bytes
            found.append(f"Share of read bandwidth, {name}: {share:.0%}.")
        elif name.startswith("prefill"):
            share = 2 * products_per_token(ours.engine) * speed / limits.integer_ops
            found.append(f"Share of the integer peak, {name}, all phases: {share:.0%}.")
    return found


def load_peers(path: Path, n_threads: int, quants: Sequence[str], flash: str) -> dict[str, list[LlamaCpp]]:
    """A runner for each file and setting. Raises PeerMissing."""
    files = {"same file": path, **{quant: requantised(path, quant) for quant in quants}}
    settings = {"both": (False, True), "on": (True,), "off": (False,)}[flash]
    return {
        label: [LlamaCpp(file, n_threads, flash=setting, label=label) for setting in settings]
        for label, file in files.items()
    }


@click.command()
@click.option("--model", default="smollm2-135m", help="A fetched name or a GGUF file.")
@click.option("--threads", multiple=True, default=(1, 2), type=click.IntRange(1), help="Give it once for each table.")
@click.option("--pairs", default=5, type=click.IntRange(1))
@click.option("--task", "names", multiple=True, type=click.Choice(list(TASKS)), help="Default: all.")
@click.option("--quant", "quants", multiple=True, default=("q4_0",), type=click.Choice(["q4_0", "q8_0"]))
@click.option("--flash", default="both", type=click.Choice(["both", "on", "off"]), help="Settings the peer may use.")
@click.option("--kv", default="f32", type=click.Choice([kind.value for kind in KvKind]))
@click.option("--markdown", "target", type=click.Path(path_type=Path), help="Append the tables to this file.")
@click.option("--floor", default=1.0, help="Exit with 1 when a ratio to the peer is below this.")
def main(
    *,
    model: str,
    threads: Sequence[int],
    pairs: int,
    names: Sequence[str],
    quants: Sequence[str],
    flash: str,
    kv: str,
    target: Path | None,
    floor: float,
) -> None:
    """Prefill, decode and batches beside llama.cpp."""
    path = resolve_model(model)
    console = Console(soft_wrap=True)
    limits = measure_limits()
    command = shlex.join(["python", "-m", "kvferry.bench.engine", *sys.argv[1:]])
    text = [f"{datetime.now(UTC):%Y-%m-%d}, `{command}`, {path.name}, {pairs} interleaved pairs, medians.", ""]
    worst = float("inf")
    for n_threads in dict.fromkeys(threads):
        ours = Ours(path, n_threads, KvKind(kv))
        try:
            peers = load_peers(path, n_threads, quants, flash)
        except PeerMissing as error:
            console.print(str(error))
            peers = {}
        lines = [run_task(TASKS[name], ours, peers, pairs) for name in names or TASKS]
        unit = f"{n_threads} thread(s): tokens per second of processor time (in brackets: by the wall clock), ratio of "
        text += [unit + ("processor time." if n_threads == 1 else "the wall clock."), ""]
        text += [*markdown(lines, list(peers), is_wall=n_threads > 1), ""]
        if n_threads == 1:
            text += [*shares(lines, ours, limits), ""]
        ratios = [
            ratio(line.ours.cpu, m.cpu) if n_threads == 1 else ratio(line.ours.wall, m.wall)
            for line in lines
            for m in line.peers.values()
        ]
        worst = min([worst, *ratios])
        ours.close()
        for settings in peers.values():
            for peer in settings:
                peer.close()
    console.print("\n".join(text), markup=False)
    if target is not None:
        with target.open("a") as file:
            file.write("\n".join(text))
    if worst < floor:
        console.print(f"below the floor of {floor} times the peer")
        sys.exit(1)


if __name__ == "__main__":
    main()
