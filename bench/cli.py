"""`kvferry bench`: every benchmark by its name."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Final

import click

from kvferry.terminal.interrupts import stop_signals_interrupt

MODULES: Final = {
    "engine": ("engine", "Prefill and decode beside llama.cpp."),
    "quality": ("quality", "Perplexity of every kind of weights and rows."),
    "serving": ("serving", "The time between tokens beside a long prompt."),
    "store": ("store", "Saving and restoring beside dd."),
    "saving": ("saving", "What a growing chat writes and waits."),
    "resume-kinds": ("resume", "Every kind of snapshot from every kind of disk."),
    "coordinator": ("coordinator", "What the coordinator adds to a stream."),
    "routing": ("routing", "Routing beside other rules, simulated."),
    "routing-real": ("routing_real", "The same with real nodes."),
    "lcp-index": ("lcp_index", "The index of prefixes."),
}


@click.group()
def bench() -> None:
    """Measure, as ratios against a peer in the same run."""
    click.get_current_context().with_resource(stop_signals_interrupt())


def _passes_on(name: str, module: str, what: str) -> None:
    @bench.command(
        name,
        help=f"{what} Takes what `python -m kvferry.bench.{module}` takes; --help lists it.",
        epilog=f"Example: kvferry bench {name} --help",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        sys.argv = [f"kvferry bench {name}", *arguments]
        import_module(f"kvferry.bench.{module}").main()


for _name, (_module, _what) in MODULES.items():
    _passes_on(_name, _module, _what)


@bench.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--tokens", "n_tokens", type=click.IntRange(64), default=2048, show_default=True,
              help="Of the conversation.")  # fmt: skip
@click.option("--kv", type=click.Choice(["f32", "f16", "q8"]), default="f32", show_default=True,
              help="How rows are kept.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), default=None, help="Of the engine. Default: the fast cores.")
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="The medians are told.")
@click.option("--cold", is_flag=True, help="Read the snapshot from the disk, not from the system's cache.")
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False, exists=True), default=None,
              help="On the disk to measure. Default: the current one.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), default=None, help="A picture, .svg or .png.")
@click.option("--json", "as_json", is_flag=True, help="Every figure of every round; the steps go to stderr.")
def resume(
    model: str, n_tokens: int, kv: str, threads: int | None, rounds: int, cold: bool, directory: Path | None,
    plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Kill a process after a long prompt, and resume in another one.

    A cold process computes a long prompt, saves, and is killed with SIGKILL; a second process goes on with the same
    conversation, from the snapshot and computing it again. Every step is told with its command and its log.

    Example: kvferry bench resume --kv q8 --plot resume.svg
    """
    from rich.console import Console

    from kvferry.bench.resume_experiment import Experiment
    from kvferry.bench.resume_report import check_plot, draw, figures_of, table_of
    from kvferry.engine.files.open_model import open_model
    from kvferry.engine.files.resolve import resolve_model

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)

    def say(step: str, line: str) -> None:
        if step:
            console.print(f"\n[bold]{step}[/bold]")
        if line:
            console.print(f"   {line}", markup=False)

    if plot is not None:
        check_plot(plot)
    config = open_model(resolve_model(model)).config
    row_bytes = 2 * config.n_layers * config.kv_dim * 4
    flags = ["--kv", kv, "--kv-memory", f"{2 * (n_tokens + 1024) * row_bytes}"]
    if threads is not None:
        flags += ["--threads", str(threads)]
    with tempfile.TemporaryDirectory(dir=directory or Path.cwd(), prefix="tmp") as folder:
        experiment = Experiment(Path(folder), model, n_tokens, tuple(flags), cold, say)
        for number in range(rounds):
            console.rule(f"round {number + 1} of {rounds}")
            experiment.run()
    if as_json:
        click.echo(json.dumps(figures_of(experiment), indent=2))
    else:
        console.print(table_of(experiment))
    if plot is not None:
        draw(experiment, plot)
        console.print(f"plot: {plot}")
