"""What the gateway adds to a stream: the same answers read over gRPC and as server-sent events, in one run.

Worker, coordinator, gateway and reader are four processes. The worker has no engine: it sends a token every so often,
and notes when. A token's latency is from there to its reader, so that what the gateway adds is the difference between
the two ways. Then readers that do not read join, and the others' latencies and the gateway's memory are looked at.

    python -m kvferry.bench.gateway [--streams 200] [--tokens 60] [--gap-ms 200]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc.aio
import psutil

from kvferry.bench.coordinator import EchoWorker, serve_worker, wait_for
from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc, common_pb2, worker_pb2
from kvferry.telemetry.pauses import keep_loaded

MODEL = "smollm2-135m"
N_SLOW = 8
SLOW_GAP_US = 4_000
SLOW_TOKENS = 3_000
ASK = "Say something."


class NotingWorker(EchoWorker):
    """Writes down when it sent each token of a turn, in seconds of the machine's monotonic clock."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes.open("a", encoding="utf-8")

    async def RunTurn(  # noqa: N802 - the proto's name
        self, request: worker_pb2.RunTurnRequest, context: Any
    ) -> AsyncIterator[worker_pb2.RunTurnResponse]:
        sent: list[float] = []
        async for response in super().RunTurn(request, context):
            sent += [time.monotonic()] * len(response.tokens.tokens)
            yield response
        self._notes.write(json.dumps([request.session_id, sent]) + "\n")
        self._notes.flush()


@dataclass
class Reading:
    """When tokens came, by (session, index), and what went wrong."""

    came: dict[tuple[str, int], float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def latencies(self, notes: Path, *, in_crowd: bool = False) -> list[float]:
        """Milliseconds, sorted. ``in_crowd``: only of tokens that were sent while all streams ran."""
        sent: dict[tuple[str, int], float] = {}
        for line in notes.read_text().splitlines():
            session_id, times = json.loads(line)
            sent |= {(session_id, index): at for index, at in enumerate(times)}
        at_all = {key: sent[key] for key in self.came if key in sent}
        last = max(index for _, index in at_all)
        begins = max(at for (_, index), at in at_all.items() if index == 0) if in_crowd else 0.0
        ends = min(at for (_, index), at in at_all.items() if index == last) if in_crowd else float("inf")
        return sorted((self.came[key] - at) * 1e3 for key, at in at_all.items() if begins <= at <= ends)


async def read_grpc(address: str, n: int, n_tokens: int, gap_us: int) -> Reading:
    """As a program that speaks gRPC, over one channel."""
    reading = Reading()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = chat_pb2_grpc.ChatServiceStub(channel)

        async def one() -> None:
            await asyncio.sleep(random.random())
            session = (await stub.CreateSession(chat_pb2.CreateSessionRequest())).session.session_id
            request = chat_pb2.GenerateRequest(
                session_id=session,
                messages=[chat_pb2.ChatMessage(role="user", content=ASK)],
                max_tokens=n_tokens,
                sampling=common_pb2.SamplingSettings(seed=gap_us),
            )
            async for response in stub.Generate(request):
                if response.event.HasField("token"):
                    reading.came[session, response.event.sequence] = time.monotonic()

        await _all(reading, [one() for _ in range(n)])
    return reading


async def read_sse(address: str, n: int, n_tokens: int, gap_us: int) -> Reading:
    """As a program that speaks HTTP, one connection for each stream, with as little of its own as can be."""
    reading = Reading()

    async def one() -> None:
        await asyncio.sleep(random.random())
        reader, writer = await _post(address, n_tokens, gap_us)
        is_done = False
        while line := await reader.readline():
            if line.startswith(b"id: "):
                request_id, _, place = line[4:].decode().strip().rpartition(":")
                if 0 <= (index := int(place) - 2) < n_tokens:  # before and after them: the role, the end
                    reading.came[f"{request_id}.0", index] = time.monotonic()
            is_done |= line.startswith(b"data: [DONE]")
            if is_done or line == b"0\r\n":
                break
        writer.close()
        if not is_done:
            raise RuntimeError("a stream ended before its end")

    await _all(reading, [one() for _ in range(n)])
    return reading


async def _post(address: str, n_tokens: int, gap_us: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = _body(n_tokens, gap_us)
    writer.write(_head(len(body)) + body)
    await writer.drain()
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the gateway answered {status.decode().strip()}")
    return reader, writer


def _head(n_bytes: int) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % n_bytes
    )


def _body(n_tokens: int, gap_us: int) -> bytes:
    messages = [{"role": "user", "content": ASK}]
    return json.dumps({"messages": messages, "max_tokens": n_tokens, "seed": gap_us, "stream": True}).encode()


async def _all(reading: Reading, streams: list[Any]) -> None:
    for result in await asyncio.gather(*streams, return_exceptions=True):
        if isinstance(result, BaseException):
            reading.errors.append(f"{type(result).__name__}: {result}")


@contextlib.contextmanager
def slow_readers(address: str) -> Iterator[None]:
    """Connections that ask for an answer and never read it."""
    host, _, port = address.rpartition(":")
    sockets = []
    body = _body(SLOW_TOKENS, SLOW_GAP_US)
    for _ in range(N_SLOW):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((host, int(port)))
        one.sendall(_head(len(body)) + body)
        sockets.append(one)
    try:
        yield
    finally:
        for one in sockets:
            one.close()


def told(name: str, reading: Reading, latencies: list[float], n_expected: int) -> None:
    at = statistics.quantiles(latencies, n=100)
    print(
        f"{name:28} {len(reading.came):6} of {n_expected} tokens, {len(reading.errors)} errors, "
        f"ms p50 {at[49]:.2f} p90 {at[89]:.2f} p99 {at[98]:.2f} max {latencies[-1]:.1f}"
    )
    for error in reading.errors[:3]:
        print(f"  {error}")


@dataclass
class Processes:
    """The cluster's processes, by name."""

    folder: Path
    by_name: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str) -> str:
        """Returns the address it says."""
        ready = self.folder / f"{name}.ready"
        self.by_name[name] = subprocess.Popen([*arguments, str(ready)])
        wait_for(ready)
        said = ready.read_text()
        return str(json.loads(said)["address"]) if said.startswith("{") else said

    def cpu_seconds(self) -> dict[str, float]:
        """Since their start."""
        times = {name: psutil.Process(one.pid).cpu_times() for name, one in self.by_name.items()}
        return {name: one.user + one.system for name, one in times.items()}

    def rss_mib(self, name: str) -> float:
        """Of its memory."""
        return float(psutil.Process(self.by_name[name].pid).memory_info().rss / (1 << 20))

    def stop(self) -> None:
        """All of them."""
        for one in self.by_name.values():
            one.terminate()
        for one in self.by_name.values():
            one.wait(20)


def measure(processes: Processes, coordinator: str, gateway: str, n: int, n_tokens: int, gap_us: int) -> None:
    """Both ways, then with slow readers."""
    notes = processes.folder / "notes"
    n_all = n * n_tokens
    asyncio.run(read_grpc(coordinator, 8, 5, 1_000))  # warm
    asyncio.run(read_sse(gateway, 8, 5, 1_000))
    readings = {}
    for way, read, address in (("gRPC", read_grpc, coordinator), ("gateway", read_sse, gateway)):
        before = processes.cpu_seconds()
        readings[way] = asyncio.run(read(address, n, n_tokens, gap_us))
        spent = {name: at - before[name] for name, at in processes.cpu_seconds().items()}
        told(f"{n} streams, {way}", readings[way], readings[way].latencies(notes), n_all)
        each = ", ".join(f"{name} {seconds / n_all * 1e6:.0f}" for name, seconds in spent.items())
        print(f"  CPU, microseconds a token: {each}")
    for in_crowd, which in ((False, "all tokens"), (True, "tokens while all streams ran")):
        direct, through = (
            statistics.quantiles(readings[way].latencies(notes, in_crowd=in_crowd), n=100) for way in readings
        )
        print(
            f"added by the gateway, {which}: ms p50 {through[49] - direct[49]:.2f} p99 {through[98] - direct[98]:.2f} "
            f"(p99 {direct[98]:.2f} and {through[98]:.2f})"
        )
    before_mib = processes.rss_mib("gateway")
    with slow_readers(gateway):
        crowd = asyncio.run(read_sse(gateway, n // 4, n_tokens, gap_us))
        grown = processes.rss_mib("gateway") - before_mib
    told(f"{n // 4} beside {N_SLOW} slow readers", crowd, crowd.latencies(notes), n // 4 * n_tokens)
    print(f"the gateway's memory grew by {grown:.1f} MiB meanwhile")


@click.command()
@click.option("--streams", default=200, show_default=True)
@click.option("--tokens", default=60, show_default=True)
@click.option("--gap-ms", default=200.0, show_default=True, help="Between two tokens of a stream.")
@click.option("--serve", nargs=2, hidden=True)
def main(streams: int, tokens: int, gap_ms: float, serve: tuple[str, str] | None) -> None:
    """Measure, and print a table."""
    if serve is not None:
        keep_loaded()
        ready = Path(serve[1])
        asyncio.run(serve_worker(serve[0], ready, NotingWorker(ready.with_name("notes"))))  # type: ignore[abstract]  # the rest is never asked
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        processes = Processes(Path(folder))
        run = [sys.executable, "-m", "kvferry.client.cli"]
        try:
            listen = ["--log-level", "error", "--listen", "127.0.0.1:0", "--ready-file"]
            state = ["--model", MODEL, "--state", f"{folder}/state"]
            coordinator = processes.start("coordinator", *run, "coordinator", "run", *state, *listen)
            processes.start("worker", sys.executable, "-m", "kvferry.bench.gateway", "--serve", coordinator)
            gateway = processes.start("gateway", *run, "gateway", "run", "--coordinator", coordinator, *listen)
            keep_loaded()  # a reader's own pauses are nobody's latency
            measure(processes, coordinator, gateway, streams, tokens, round(gap_ms * 1e3))
        finally:
            processes.stop()


if __name__ == "__main__":
    main()
