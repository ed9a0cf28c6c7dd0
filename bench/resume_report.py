"""What `kvferry bench resume` tells at the end: a table, all figures, and a picture of where the seconds go."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.table import Table

from kvferry.bench.resume_experiment import Experiment, Round


def table_of(experiment: Experiment) -> Table:
    """Medians, and the ratios with what each of them counts."""
    of = experiment.median_of
    n_rounds = len(experiment.rounds)
    title = f"{experiment.n_tokens} tokens and the next turn, medians of {n_rounds} round{'s' * (n_rounds > 1)}"
    table = Table("", "computed again", "from the snapshot", "ratio", title=title)
    table.add_row(
        "prompt, as the node reports it",
        f"{of(lambda r: r.computed.prefix.prefill_seconds):.3f} s",
        f"{of(lambda r: r.resumed.prefix.restore_seconds + r.resumed.prefix.prefill_seconds):.3f} s",
        f"{of(lambda r: r.prefill_ratio):.1f} x (prefill)",
    )
    table.add_row(
        "first token, as the caller sees it",
        f"{of(lambda r: r.computed.first_s):.3f} s",
        f"{of(lambda r: r.resumed.first_s):.3f} s",
        f"{of(lambda r: r.wall_ratio):.1f} x (wall)",
    )
    table.add_row(
        "the same with the start of the process",
        f"{of(lambda r: r.second_start_s + r.computed.first_s):.2f} s",
        f"{of(lambda r: r.second_start_s + r.resumed.first_s):.2f} s",
        f"{of(lambda r: r.wall_ratio_with_start):.1f} x",
    )
    table.add_row(
        "left to save after the answer",
        "",
        f"{of(lambda r: r.save_s):.3f} s, {of(lambda r: r.n_bytes / 1e6):.1f} MB",
        "",
    )
    return table


def figures_of(experiment: Experiment) -> list[dict[str, float]]:
    """Every round; seconds, bytes, tokens and ratios."""
    return [_figures(done) for done in experiment.rounds]


def _figures(done: Round) -> dict[str, float]:
    return {
        "start_seconds": done.second_start_s,
        "save_seconds": done.save_s,
        "snapshot_bytes": done.n_bytes,
        "n_restored": done.resumed.prefix.n_restored,
        "restore_seconds": done.resumed.prefix.restore_seconds,
        "resumed_prefill_seconds": done.resumed.prefix.prefill_seconds,
        "resumed_first_token_seconds": done.resumed.first_s,
        "computed_prefill_seconds": done.computed.prefix.prefill_seconds,
        "computed_first_token_seconds": done.computed.first_s,
        "prefill_ratio": done.prefill_ratio,
        "wall_ratio": done.wall_ratio,
        "wall_ratio_with_start": done.wall_ratio_with_start,
    }


def check_plot(path: Path) -> None:
    """Find out before the experiment what would keep ``draw`` from its picture afterwards. Raises ClickException."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as missing:
        raise click.ClickException(
            "the plot needs matplotlib: pip install 'kvferry[plot]', or leave --plot out"
        ) from missing
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise click.ClickException(f"{path}: a picture ends with one of {', '.join(f'.{kind}' for kind in kinds)}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise click.ClickException(f"{path}: no file can be made in the folder {path.parent}")


def draw(experiment: Experiment, path: Path) -> None:
    """Two bars, in seconds; the suffix of ``path`` says the format (.svg, .png). ``check_plot`` has let it through."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "kvferry"  # the same figures make the same file
    parts = {
        "restored": [0.0, experiment.median_of(lambda r: r.resumed.prefix.restore_seconds)],
        "computed": [
            experiment.median_of(lambda r: r.computed.prefix.prefill_seconds),
            experiment.median_of(lambda r: r.resumed.prefix.prefill_seconds),
        ],
    }
    walls = [experiment.median_of(lambda r: r.computed.first_s), experiment.median_of(lambda r: r.resumed.first_s)]
    parts["the rest of the wait"] = [
        max(0.0, wall - read - done) for wall, read, done in zip(walls, *parts.values(), strict=True)
    ]
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    left = [0.0, 0.0]
    for (name, seconds), colour in zip(parts.items(), ("#0a9396", "#ee9b00", "#94a3b8"), strict=True):
        axes.barh(["computed again", "from the snapshot"], seconds, left=left, label=name, color=colour)
        left = [done + more for done, more in zip(left, seconds, strict=True)]
    for row, wall in enumerate(walls):
        axes.text(wall, row, f" {wall:.2f} s", va="center")
    axes.set_xlim(0, max(walls) * 1.15)
    axes.set_xlabel("seconds until the first token")
    prefill, wall = (experiment.median_of(ratio) for ratio in (lambda r: r.prefill_ratio, lambda r: r.wall_ratio))
    ratios = f"prefill {prefill:.1f} x, wall {wall:.1f} x"
    axes.set_title(f"{experiment.model}, {experiment.n_tokens} tokens, a process just started: {ratios}")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
