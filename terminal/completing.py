"""Names that a shell completes: each room says its own (entry points `kvferry.completions`), quickly or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Final

import click
from click.shell_completion import CompletionItem

GROUP: Final = "kvferry.completions"
PATIENCE_S: Final = 1.0
"""A person who pressed TAB waits; a coordinator that is away must not hold the shell."""

Names = Callable[[click.Context], Iterable[str]]


def completes(what: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """For `shell_complete=` of an option or argument. ``what``: "models" or "sessions"."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in _names(what, context) if name.startswith(incomplete)]

    return complete


def _names(what: str, context: click.Context) -> list[str]:
    """In a thread that is left behind if it takes too long; silent about everything."""
    found: list[str] = []

    def ask() -> None:
        try:
            for point in entry_points(group=GROUP, name=what):
                names: Names = point.load()
                found.extend(names(context))
        except Exception:  # noqa: BLE001 - a shell has no place for it
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return sorted(set(found))
