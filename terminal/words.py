"""The gate for all that a person reads: no word of a model, a file or another user works the terminal."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import click

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 without newlines and tabs: they would set titles, colours and cursors."""


def visible(text: str) -> str:
    r"""Control characters as ``\x1b``; newlines and tabs stay."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text.replace("\r\n", "\n"))


def shown(text: str, *, err: bool = False) -> str:
    """The text as it may go to standard output or error: visible on a terminal, and to a pipe as it is."""
    stream = sys.stderr if err else sys.stdout
    return visible(text) if stream is not None and stream.isatty() else text


def say(text: object = "", *, err: bool = False, nl: bool = True, color: bool | None = None, **style: Any) -> None:
    """For a person, in click's ``style`` if there is one; what is in it is ``shown``. JSON goes by ``print_json``.

    A style ends with a code, so a piece of a text that is told as it comes has none.
    """
    words = shown(str(text), err=err)
    click.echo(click.style(words, **style) if style else words, nl=nl, err=err, color=color)
