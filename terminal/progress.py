"""How far something is, on standard error: a bar with rate and time left on terminals, a line at times elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvferry.terminal.output import console
from kvferry.terminal.units import duration_text

FIRST_LINE_S: Final = 5.0
"""What takes less needs no word of how far it is."""
NEXT_LINE_S: Final = 10.0
_JOURNAL_VARIABLE: Final = "JOURNAL_STREAM"
"""Set by systemd: a log is read afterwards, by programs too."""


class Gauge:
    """How far it is; for one thread at a time. Shown from the first word on that anything was done."""

    def __init__(self, show: Callable[[int, int | None], None], total: int | None) -> None:
        self._show, self._total, self._done = show, total, 0

    def advance(self, n: int) -> None:
        """So much more is done."""
        self._done += n
        self._show(self._done, self._total)

    def set(self, done: int, total: int | None) -> None:
        """So much is done, of so much."""
        self._done, self._total = done, total
        self._show(done, total)


@contextmanager
def gauge(what: str, total: int | None = None, *, quiet: bool = False, in_bytes: bool = True) -> Iterator[Gauge]:
    """``quiet``: show nothing. What is counted is bytes, or things."""
    if quiet or (not sys.stderr.isatty() and os.environ.get(_JOURNAL_VARIABLE)):
        yield Gauge(lambda _done, _total: None, total)
    elif sys.stderr.isatty():
        counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
        columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
        with Progress(*columns, console=console(err=True), transient=True) as bar:
            task = bar.add_task(what, total=total, visible=False)
            yield Gauge(lambda done, total: bar.update(task, completed=done, total=total, visible=True), total)
    else:
        yield Gauge(Lines(what, in_bytes=in_bytes), total)


class Lines:
    """A line when it has taken long, and then now and then."""

    def __init__(
        self,
        what: str,
        *,
        in_bytes: bool,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self._what, self._in_bytes, self._clock, self._say = what, in_bytes, clock, say
        self._began_s = clock()
        self._next_s = self._began_s + FIRST_LINE_S

    def __call__(self, done: int, total: int | None) -> None:
        """Maybe says so."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + NEXT_LINE_S
        rate = done / (now - self._began_s)
        told = [f"{done / total:.0%}"] if total else []
        of = f" of {self._amount(total)}" if total else ""
        told += [f"{self._amount(done)}{of}", f"{self._amount(int(rate)) if self._in_bytes else f'{rate:.1f}'}/s"]
        if total and rate:
            told.append(f"{duration_text((total - done) / rate)} left")
        self._say(f"{self._what}: {', '.join(told)}")

    def _amount(self, n: int) -> str:
        return decimal(n) if self._in_bytes else str(n)
