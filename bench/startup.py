"""How long a node takes from the start of its process until it serves, and what it holds in memory then.

`python -m kvferry.bench.startup [--model M] [--runs N] [--cold]`
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from kvferry.engine.files.catalogue import cache_root
from kvferry.engine.files.resolve import resolve_model

_POLL_SECONDS: Final = 0.005
_PATIENCE_SECONDS: Final = 280.0
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """``memory``: bytes by the names of /proc/PID/smaps_rollup, of a node that has just become ready."""

    seconds: float
    memory: dict[str, int]


@click.command()
@click.option("--model", default="smollm2-135m", help="A fetched name, a GGUF file or a model folder.")
@click.option("--runs", default=5, type=click.IntRange(1), help="Warm starts of each kind.")
@click.option("--kv-memory", default="64MiB", help="K/V memory of the node.")
@click.option("--cold", is_flag=True, help="Also with an empty cache: kernels are compiled and weights packed.")
def main(model: str, runs: int, kv_memory: str, cold: bool) -> None:
    """Print medians of warm starts by where the weights lie, and one cold start."""
    path = resolve_model(model)
    table = Table("start", "ready after, s", "RSS, MiB", "PSS, MiB", "anonymous, MiB", "on huge pages, MiB")
    if cold:
        with tempfile.TemporaryDirectory() as folder:
            _row(table, "cold: empty cache", [start_node(path, ["--kv-memory", kv_memory], {"KVFERRY_CACHE": folder})])
    for weights in ("memory", "mmap", "stream"):
        arguments = ["--kv-memory", kv_memory, "--weights", weights]
        start_node(path, arguments, {})  # makes what a first start makes
        _row(table, f"warm, weights {weights}", [start_node(path, arguments, {}) for _ in range(runs)])
    Console(width=120).print(table)
    packs = sorted((cache_root() / "packed").glob("*.kvfpack"), key=lambda pack: pack.stat().st_mtime)
    if packs:
        Console().print(f"packed: {packs[-1].stat().st_size / _MIB:.1f} MiB")


def start_node(model: Path, arguments: Sequence[str], environment: dict[str, str]) -> Start:
    """Start a node, wait until it serves, look at it and stop it. Raises RuntimeError when it ends before."""
    folder = Path(tempfile.mkdtemp())
    try:
        ready = folder / "ready.json"
        command = [sys.executable, "-m", "kvferry.client.cli", "node", "run", "--model", str(model)]
        command += ["--node-id", "bench", "--ready-file", str(ready), *arguments]
        with (folder / "log").open("wb") as log:
            began_at = time.monotonic()
            node = subprocess.Popen(command, stderr=log, env=os.environ | environment)
        try:
            while not ready.exists():
                if node.poll() is not None or time.monotonic() - began_at > _PATIENCE_SECONDS:
                    raise RuntimeError(f"the node did not become ready: {(folder / 'log').read_text()}")
                time.sleep(_POLL_SECONDS)
            seconds = time.monotonic() - began_at
            return Start(seconds, memory_of(int(json.loads(ready.read_text())["pid"])))
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait()
    finally:
        shutil.rmtree(folder)


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by name, of a process's /proc/PID/smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}


def _row(table: Table, name: str, starts: list[Start]) -> None:
    seconds = statistics.median(start.seconds for start in starts)
    figures = [
        statistics.median(start.memory.get(field, 0) for start in starts) / _MIB
        for field in ("Rss", "Pss", "Anonymous", "AnonHugePages")
    ]
    table.add_row(name, f"{seconds:.2f}", *(f"{figure:.0f}" for figure in figures))


if __name__ == "__main__":
    main()
