"""`kvferry top`."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.live import Live

from kvferry.client.commands.options import connect, coordinator_option
from kvferry.client.top.picture import Picture
from kvferry.client.top.view import view
from kvferry.client.top.watch import Watch
from kvferry.terminal.output import console, json_line, json_option

_LEAVE = frozenset(b"qQ\x03")
_ESCAPE = b"\x1b"
"""Alone; keys such as the arrows send it with more behind it."""


@click.command(epilog="Example: kvferry top --once --json")
@coordinator_option
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two refreshes.",
)
@click.option("--once", is_flag=True, help="Look for one interval, print, and end.")
@json_option
def top(coordinator: str, interval: float, once: bool, as_json: bool) -> None:
    """Watch nodes and streams as they work; q or Ctrl-C ends it.

    A coordinator that goes away is told, and waited for. With --json each refresh is one line. It reads along in the
    turns that run, and shows no word of them.
    """
    with connect(coordinator, patience_s=0) as client:
        watch = Watch(client, coordinator)
        if once:
            watch.look()
            time.sleep(interval)
            picture = watch.look()
            _print(picture, as_json=as_json)
            sys.exit(1 if picture.trouble else 0)
        if as_json or not sys.stdout.isatty():
            _print_all(watch, interval, as_json=as_json)
        else:
            _live(watch, interval)


def _print(picture: Picture, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_line(picture.facts()))
        return
    out = console()
    width, height = (out.size.width, out.size.height) if out.is_terminal else (200, 1000)
    out.print(view(picture, width, height))


def _print_all(watch: Watch, interval: float, *, as_json: bool) -> None:
    try:
        while True:
            _print(watch.look(), as_json=as_json)
            sys.stdout.flush()
            time.sleep(interval)
    except KeyboardInterrupt:  # how one leaves it
        return


def _live(watch: Watch, interval: float) -> None:
    out = console()
    with _keys() as wants_to_leave, Live(console=out, screen=True, auto_refresh=False) as live:
        try:
            while True:
                picture = watch.look()
                live.update(view(picture, out.size.width, out.size.height), refresh=True)
                if wants_to_leave(interval):
                    return
        except KeyboardInterrupt:
            return


class _Keyboard:
    """Single keys of a terminal; without one, time only passes."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, timeout_s: float) -> bool:
        """Waits; True as soon as a key says to leave."""
        if self._descriptor is None:
            time.sleep(timeout_s)
            return False
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], left)[0]:
                # not by sys.stdin, which would take more than it gives, and the rest would wait there for another key
                keys = os.read(self._descriptor, 1024)
                if not keys or keys == _ESCAPE or _LEAVE & set(keys):
                    return True
        return False


@contextmanager
def _keys() -> Iterator[_Keyboard]:
    """The terminal as it was is put back, whatever happens."""
    if not sys.stdin.isatty():
        yield _Keyboard(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
