"""Options and output that the commands share."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from kvferry.client.errors import ClientError
from kvferry.client.sdk.aio import DEFAULT_ADDRESS

Command = TypeVar("Command", bound=Callable[..., Any])

UNARY_PATIENCE_S = 2.0
"""A person who asks for a list would rather see the error than wait a minute; a restart of the coordinator fits in."""


def coordinator_option(command: Command) -> Command:
    """--coordinator HOST:PORT or several, else $KVFERRY_COORDINATOR."""
    return click.option(
        "--coordinator",
        default=DEFAULT_ADDRESS,
        show_default=True,
        envvar="KVFERRY_COORDINATOR",
        show_envvar=True,
        metavar="HOST:PORT[,...]",
        help="Where the coordinator listens, or several of them.",
    )(command)


def json_option(command: Command) -> Command:
    """--json: for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_json(value: Any) -> None:
    """Dataclasses and lists of them as JSON."""
    click.echo(json.dumps(value, default=_plain, indent=2))


def _plain(value: Any) -> Any:
    """Bytes, such as an image's, in base64."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else dataclasses.asdict(value)


def print_table(columns: list[str], rows: list[list[str]], empty: str) -> None:
    """A plain table, or a sentence when there is nothing in it. Columns that start with # are numbers."""
    if not rows:
        click.echo(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith("#")
        table.add_column(column.removeprefix("#"), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width; never cut what a program may read
    console.print(table)


def tell_outage(error: ClientError, patience_s: float) -> None:
    """The SDK's hook: a person who waits is told at once for what, and how long."""
    click.secho(f"[{str(error).rstrip('.')}; trying on for {patience_s:g} s]", dim=True, err=True)


def bytes_text(n_bytes: int) -> str:
    """12.3 MiB."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def duration_text(seconds: float) -> str:
    """3.2 s, 4 min, 5.1 h, 3.0 d."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
