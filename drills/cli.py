"""`kvferry up` and `kvferry drill`."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import click
import platformdirs

from kvferry.drills.cluster import ClusterOptions, LocalCluster, default_threads_per_node
from kvferry.drills.demo import DemoOptions, run_demo
from kvferry.drills.drill_commands import DEMO, explain, list_scenarios, run, say
from kvferry.drills.drill_report import default_reports
from kvferry.drills.errors import ProcessFailed, VerdictFailed
from kvferry.drills.model import DEFAULT_MODEL, get_ready
from kvferry.drills.report import as_json as result_facts
from kvferry.drills.report import print_report
from kvferry.drills.supervisor import Supervisor
from kvferry.terminal.completing import completes
from kvferry.terminal.interrupts import stop_signals_interrupt
from kvferry.terminal.output import console as plain_console
from kvferry.terminal.output import json_option
from kvferry.trust.options import TLS_DIR_VARIABLE

REPORT_COLUMNS: Final = 110
"""When nobody says how wide the output is: the timeline's longest line."""

WATCH_S: Final = 0.5

model_option = click.option(
    "--model",
    default=DEFAULT_MODEL,
    shell_complete=completes("models"),
    show_default=True,
    help="A fetched name, file or folder.",
)
threads_option = click.option(
    "--threads-per-node",
    type=click.IntRange(min=1),
    default=None,
    help="Default: half of the CPUs, at least 1.",
)


@click.command(epilog="Example: kvferry up --nodes 3")
@click.option("--nodes", "n_nodes", type=click.IntRange(min=1, max=64), default=3, show_default=True)
@model_option
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Keeps sessions, snapshots and logs. Default: a folder of the user's data directory.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=7070, show_default=True, help="0: any free one.")
@click.option(
    "--http-port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Of dashboard and OpenAI API."
)
@threads_option
def up(
    n_nodes: int, model: str, directory: Path | None, port: int, http_port: int, threads_per_node: int | None
) -> None:
    """Start a local cluster: a coordinator, some nodes and a gateway, each a process of its own.

    What dies is started again. Ctrl-C, SIGTERM or closing the terminal stops it all and saves the sessions; a second
    Ctrl-C stops it at once. nohup keeps it running without a terminal.
    """
    options = ClusterOptions(
        model=model,
        directory=directory or platformdirs.user_data_path("kvferry") / "up",
        n_nodes=n_nodes,
        port=port,
        http_port=http_port,
        drill_reports=default_reports(),
        threads_per_node=threads_per_node or default_threads_per_node(),
        starts_whole=False,
    )
    get_ready(model)
    say("starting")
    with stop_signals_interrupt(), LocalCluster(options) as cluster:
        with suppress(KeyboardInterrupt):
            _print_how_to_go_on(cluster)
            _watch(cluster)
        say("stopping: sessions are saved")
        forced = cluster.stop()
    if forced:
        raise ProcessFailed(f"{', '.join(forced)} did not stop in time and had to be killed.")
    say("stopped")


@click.group()
def drill() -> None:
    """Break a real cluster and judge what happened."""


@drill.command("list", epilog="Example: kvferry drill list")
@json_option
def list_drills(as_json: bool) -> None:
    """List the drills, after undoing what a killed one left behind."""
    list_scenarios(as_json=as_json)


drill.add_command(explain)
drill.add_command(run)


@drill.command(help=DEMO, epilog="Example: kvferry drill demo --seed 7")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Default: a new one, which is printed.")
@model_option
@threads_option
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), default=None, help="Write it all."
)
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), default=None, help="Keep files and logs here."
)
def demo(seed: int | None, model: str, threads_per_node: int | None, json_file: Path | None, keep: Path | None) -> None:
    """Run the demo; exit code 20 when a token was lost, came twice or differs."""
    console = plain_console()
    if not console.is_terminal:
        console.width = REPORT_COLUMNS
    with _directory(keep) as directory, stop_signals_interrupt(), console.status("…") as status:
        options = DemoOptions(
            directory=directory,
            seed=secrets.randbelow(1_000_000) if seed is None else seed,
            model=model,
            threads_per_node=threads_per_node or default_threads_per_node(),
        )

        def say_beside_status(line: str) -> None:
            console.print(line, style="dim", markup=False)
            status.update(line)

        result = run_demo(options, say_beside_status)
        print_report(result, console)
        if json_file is not None:
            json_file.write_text(json.dumps(result_facts(result), indent=1) + "\n", encoding="utf-8")
        if not result.verdict.is_good:
            raise VerdictFailed(f"The conversation was not the same (seed {result.seed}).")


def _print_how_to_go_on(cluster: LocalCluster) -> None:
    alone = (
        "env -u KVFERRY_TLS_DIR " if os.environ.get(TLS_DIR_VARIABLE) else ""
    )  # meant for a cluster with certificates
    where = "" if cluster.address.endswith(":7070") else f" --coordinator {cluster.address}"
    click.echo(f"coordinator  {cluster.address}  pid {cluster.coordinator.pid}")
    for name, node in cluster.nodes.items():
        click.echo(f"{name}       {f'pid {node.pid}' if node.is_running else 'does not run'}")
    click.echo(f"files        {cluster.directory}\n")
    click.echo(f"Watch it:        http://{cluster.http_address}/   (nodes, turns, a chat with a button that kills)")
    click.echo(f"OpenAI API:      http://{cluster.http_address}/v1")
    click.echo(f"Talk to it:      {alone}kvferry chat{where}")
    click.echo(f"Look at it:      {alone}kvferry status{where}")
    click.echo(f"Break it:        kill -9 {next(iter(cluster.nodes.values())).pid}   (in the middle of an answer)")
    click.echo("Whatever dies is started again; its new pid is told here.")
    click.echo("Ctrl-C stops it; sessions are there again at the next start.")


def _watch(cluster: LocalCluster) -> None:
    """Until Ctrl-C; what dies is started again."""
    supervisor = Supervisor(cluster, say)
    while True:
        time.sleep(WATCH_S)
        supervisor.step()


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """A folder that goes when all went well; what a failed drill left is evidence, and stays."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    directory = Path(tempfile.mkdtemp(prefix="kvferry-drill-"))
    try:
        yield directory
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    except Exception:
        if any(directory.iterdir()):
            click.echo(f"files and logs of the drill: {directory}", err=True)
        else:
            directory.rmdir()
        raise
    shutil.rmtree(directory, ignore_errors=True)
