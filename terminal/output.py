"""Results: a table for a person, one JSON document for a program. They go to standard output, whole."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvferry.terminal.words import say, visible

Command = TypeVar("Command", bound=Callable[..., Any])

_PIPED_WIDTH: Final = 1000
"""A pipe has no width: names in tables are for other commands, and never cut."""


def json_option(command: Command) -> Command:
    """--json, as ``as_json``: one document on standard output, whatever the terminal."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")(command)


def print_json(value: Any, *, err: bool = False) -> None:
    """Dataclasses, paths, bytes (in base64) and what JSON has itself. ``err``: where the result itself is on stdout."""
    click.echo(json.dumps(value, default=_plain, indent=2), err=err)


def json_line(value: Any) -> str:
    """The same in one line, for streams of them."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, Path) else dataclasses.asdict(value)


def colour() -> bool | None:
    """For click's `color=` where there may be no context, as in other threads: None leaves it to the terminal."""
    return False if os.environ.get("NO_COLOR") else None


class _SafeConsole(Console):
    """What is not its own control code is text, and made visible on a terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Before it is measured, so that tables stay straight."""
        return super().render_str(visible(text) if self.is_terminal else text, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Also what comes as Text."""
        for segment in super().render(renderable, options):
            is_text = self.is_terminal and not segment.control
            yield Segment(visible(segment.text), segment.style) if is_text else segment


def console(*, err: bool = False) -> Console:
    """Colours on terminals only, and not where NO_COLOR is set; a pipe gets lines that are never cut."""
    found = _SafeConsole(highlight=False, markup=False, stderr=err)
    if not found.is_terminal:
        found.width = max(found.width, _PIPED_WIDTH)
    return found


def plain_table(columns: Sequence[str]) -> Table:
    """Without lines. Columns that start with # are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith("#")
        table.add_column(column.removeprefix("#"), justify="right" if is_number else "left", overflow="fold")
    return table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """A plain table, or a sentence when there is nothing in it."""
    if not rows:
        say(empty)
        return
    table = plain_table(columns)
    for row in rows:
        table.add_row(*row)
    console().print(table)
