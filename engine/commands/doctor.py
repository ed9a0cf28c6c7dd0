"""`kvferry doctor`: what the engine finds on this machine, and whether it computes the right bits here."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvferry.engine.available import available_memory
from kvferry.engine.cores import choose_cores
from kvferry.engine.errors import SelfTestFailed
from kvferry.engine.kernels.compile_cache import compile_cache
from kvferry.engine.kernels.cpu_features import host_features
from kvferry.engine.kernels.intrinsics import ISA
from kvferry.engine.selftest import self_test

# Features that choose a kernel path, or would if there were one for them.
_TELLING = (
    "sse4.2", "avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "amx-int8",
    "neon", "dotprod", "i8mm", "sve", "sve2",
)  # fmt: skip
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_READ_BYTES = 1 << 28
_READS = 3


@click.command()
def doctor() -> None:
    """Say which kernels run here and how well, and check their bits. Ends with 1 when the bits are wrong."""
    table = Table("", "this machine", title_justify="left")
    is_well = True
    for name, value, well in findings():
        table.add_row(name, value if well else f"[red]{value}[/red]")
        is_well = is_well and well
    Console(soft_wrap=True).print(table)
    if not is_well:
        sys.exit(1)


def findings() -> Iterator[tuple[str, str, bool]]:
    """(what, what was found, whether that is well), one by one, since some take a second."""
    yield "kernel path", ISA.name, True
    present = [name for name in _TELLING if name in host_features()]
    yield "processor", f"{platform.machine()}: {', '.join(present) or 'nothing that matters'}", True
    yield "cores", _cores(), True
    cache = compile_cache()
    state = "warm: kernels are loaded" if cache.is_warm else "cold: kernels are compiled for this process alone"
    yield "compiled kernels", f"{state} ({cache.folder})", True
    yield "memory", _memory(), True
    yield "memory read by one thread", f"{read_bandwidth() / 1e9:.1f} GB/s", True
    yield _timed("golden bits, 1 thread", lambda: self_test(1))
    yield _timed("golden bits, 2 threads", lambda: self_test(2))


def read_bandwidth() -> float:
    """Bytes per second that one thread reads, by the best of a few passes over more than a cache holds."""
    data = np.ones(_READ_BYTES // 8, np.uint64)
    best = float("inf")
    for _ in range(_READS):
        started_at = time.thread_time()
        np.bitwise_or.reduce(data)
        best = min(best, time.thread_time() - started_at)
    return _READ_BYTES / best


def _cores() -> str:
    choice = choose_cores()
    return f"{choice}; {choice.n_threads} threads, unless told otherwise"


def _memory() -> str:
    try:
        huge = re.findall(r"\[(\w+)\]", HUGE_PAGES.read_text())[0]
    except (OSError, IndexError):
        huge = "none"
    effect = "weights lie on them" if huge in {"always", "madvise"} else "decode is slower for it; set it to madvise"
    return f"{decimal(available_memory())} available; huge pages: {huge}, {effect}"


def _timed(name: str, test: Callable[[], None]) -> tuple[str, str, bool]:
    started_at = time.monotonic()
    try:
        test()
    except SelfTestFailed as error:
        return name, str(error), False
    return name, f"as they should be ({time.monotonic() - started_at:.1f} s)", True
