"""How late a node's event loop wakes under load (promise 28), beside a loop that has nothing else to do.

    python -m kvferry.bench.loop_lag [--seconds 35] [--threads 2]

A real node prefills, decodes, saves and restores at once, on as many engine threads as there are processors. Meanwhile
a process that only sleeps measures the same with the same interval: whatever it sees is the machine's own, and the
judged figure is only worth something where that one is small.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import click
import grpc
from rich.console import Console
from rich.table import Table

from kvferry.engine.files.resolve import resolve_model
from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from kvferry.telemetry.loop_lag import LagSummary, LoopLag

MODEL: Final = "smollm2-135m"
P99_SECONDS: Final = 0.02
N_DECODING: Final = 2
N_PROMPT: Final = 768
IDLE_SECONDS: Final = 5.0
START_SECONDS: Final = 120.0

_epochs = itertools.count(1)


async def _watch(ends_at: float) -> LagSummary:
    """The lag of this process's loop until then."""
    lag = LoopLag(time.monotonic)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(ends_at - time.monotonic())
    task.cancel()
    return lag.summary()


def idle_lag(seconds: float) -> subprocess.Popen[str]:
    """Another process whose loop only sleeps; it prints its summary at the end."""
    command = [sys.executable, "-m", "kvferry.bench.loop_lag", "--watch", str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def summary_of(process: subprocess.Popen[str]) -> LagSummary:
    """What it printed."""
    return LagSummary(**json.loads(process.communicate()[0]))


@contextlib.contextmanager
def running_node(folder: Path, threads: int) -> Iterator[str]:
    """A node in a process of its own; yields its address."""
    ready, model = folder / "ready.json", str(resolve_model(MODEL))
    program = [sys.executable, "-c", "from kvferry.client.cli import main; main()", "node", "run", "--model", model]
    flags = ["--threads", str(threads), "--store", str(folder / "store"), "--context", "2048", "--kv-memory", "512MiB"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*program, *flags, "--ready-file", str(ready)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the node did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield str(json.loads(ready.read_text())["address"])
    finally:
        process.kill()
        process.wait()


def turn(stub: Any, tokens: Sequence[int], session: str, max_tokens: int) -> Any:
    """The call of a turn that no end token ends."""
    return stub.RunTurn(
        worker_pb2.RunTurnRequest(
            session_id=session,
            turn_id="t",
            epoch=next(_epochs),
            token_ids=tokens,
            n_prompt_tokens=len(tokens),
            max_tokens=max_tokens,
            sampling=common_pb2.SamplingSettings(seed=1),
        )
    )


def finish(call: Any) -> None:
    """Take all messages."""
    for _ in call:
        pass


def prompt(number: int) -> list[int]:
    """Shares its beginning with nobody's."""
    return [100 + number, *(200 + 7 * i % 40_000 for i in range(N_PROMPT - 1))]


class Load:
    """Everything at once, until it is told to end: decodes, prefills, saves and restores."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self.stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._ended = threading.Event()
        self.counts = {"turns decoded": 0, "prompts prefilled": 0, "sessions saved and restored": 0}
        parts = [*[self._decode] * N_DECODING, self._prefill, self._restore]
        self._threads = [threading.Thread(target=part, args=(i,)) for i, part in enumerate(parts)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._channel.close()

    def _decode(self, number: int) -> None:
        while not self._ended.is_set():
            finish(turn(self.stub, prompt(number)[:40], f"decoding-{number}", 400))
            self._forget(f"decoding-{number}", "turns decoded")

    def _prefill(self, _number: int) -> None:
        for number in itertools.count(1000):
            if self._ended.is_set():
                return
            finish(turn(self.stub, prompt(number), "prefilled", 1))
            self._forget("prefilled", "prompts prefilled")

    def _restore(self, number: int) -> None:
        while not self._ended.is_set():
            finish(turn(self.stub, prompt(number), "saved", 1))
            self.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id="saved"))
            self._forget("saved", "sessions saved and restored")

    def _forget(self, session: str, what: str) -> None:
        self.stub.DropSession(worker_pb2.DropSessionRequest(session_id=session))
        self.counts[what] += 1


def measure(threads: int, seconds: float) -> tuple[LagSummary, LagSummary, LagSummary, dict[str, int]]:
    """The node's loop, an idle one beside it, an idle one before it; and what the node did."""
    before = summary_of(idle_lag(IDLE_SECONDS))
    with tempfile.TemporaryDirectory() as folder, running_node(Path(folder), threads) as address, Load(address) as load:
        time.sleep(2.0)  # until all parts are under way
        beside = summary_of(idle_lag(seconds))
        process = load.stub.GetNodeStatus(worker_pb2.GetNodeStatusRequest()).process
        node = LagSummary(
            process.loop_lag_p50_seconds,
            process.loop_lag_p99_seconds,
            process.loop_lag_max_seconds,
            process.n_loop_lag_samples,
        )
    return node, beside, before, load.counts


@click.command()
@click.option("--seconds", default=35.0, show_default=True, help="The node's figures are of the last 30.")
@click.option("--threads", default=len(os.sched_getaffinity(0)), show_default=True, type=click.IntRange(1))
@click.option("--watch", type=float, hidden=True)
def main(seconds: float, threads: int, watch: float | None) -> None:
    """Print the three loops' lags; exit with 1 when the node's is over the promise."""
    if watch is not None:
        found = asyncio.run(_watch(time.monotonic() + watch))
        click.echo(json.dumps({name: getattr(found, name) for name in LagSummary.__slots__}))
        return
    node, beside, before, counts = measure(threads, seconds)
    table = Table(
        "event loop", "p50 ms", "p99 ms", "max ms", "samples", title=f"{threads} engine threads, {seconds:g} s"
    )
    rows = {"of the node": node, "idle, beside it": beside, "idle, before it": before}
    for name, lag in rows.items():
        table.add_row(name, *(f"{1000 * value:.2f}" for value in (lag.p50, lag.p99, lag.largest)), str(lag.n_samples))
    Console().print(table)
    click.echo(", ".join(f"{count} {what}" for what, count in counts.items()))
    click.echo(f"judged: p99 {1000 * node.p99:.1f} ms <= {1000 * P99_SECONDS:g} ms")
    sys.exit(0 if node.p99 <= P99_SECONDS else 1)


if __name__ == "__main__":
    main()
