"""What the coordinator adds to a stream: one synthetic worker asked directly and through a coordinator, in one run.

The worker has no engine: it sends tokens as fast as it is told to. Worker, coordinator and client are three processes.

    python -m kvferry.bench.coordinator [--streams 100] [--idle-sessions 500] [--soak-minutes 10]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import grpc.aio
import psutil

from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.text.model import TextModel
from kvferry.proto.channel import channel_options, server_options
from kvferry.proto.v1 import (
    chat_pb2,
    chat_pb2_grpc,
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

MODEL = "smollm2-135m"
TOKEN_S = 0.02
SOAK_GAP_US = 50_000


class EchoWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Token 1000 again and again; ``sampling.seed`` microseconds apart."""

    async def RunTurn(  # noqa: N802 - the proto's name
        self, request: worker_pb2.RunTurnRequest, context: Any
    ) -> AsyncIterator[worker_pb2.RunTurnResponse]:
        del context
        n = len(request.token_ids)
        yield worker_pb2.RunTurnResponse(prefix=common_pb2.PrefixReport(n_tokens=n, n_computed=n))
        for index in range(n - request.n_prompt_tokens, request.max_tokens):
            token = common_pb2.GeneratedToken(index=index, token_id=1000)
            yield worker_pb2.RunTurnResponse(tokens=worker_pb2.GeneratedTokens(tokens=[token]))
            await asyncio.sleep(request.sampling.seed / 1e6)
        yield worker_pb2.RunTurnResponse(finished=worker_pb2.RunFinished(reason=common_pb2.FINISH_REASON_LENGTH))


async def serve_worker(coordinator: str, ready: Path, worker: EchoWorker | None = None) -> None:
    """The worker process: registers, and beats for ever."""
    server = grpc.aio.server(options=server_options())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker or EchoWorker(), server)  # type: ignore[abstract]  # the rest is never asked
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    text = TextModel.load(resolve_model(MODEL))
    async with grpc.aio.insecure_channel(coordinator, options=channel_options()) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        terms = await fleet.Register(
            fleet_pb2.RegisterRequest(
                node_id="echo",
                boot_id="1",
                address=address,
                model="echo",
                fingerprint="f" * 32,
                tokenizer_digest=text.digest,
                vocabulary_size=text.vocab_size,
                context_length=100_000,
                max_running=1_000,
                geometry=common_pb2.KvGeometry(n_layers=30, n_kv_heads=3, head_dim=64, block_size=32),
            )
        )
        ready.write_text(address)  # noqa: ASYNC240 - once, and nobody waits
        while True:
            await asyncio.sleep(terms.heartbeat_seconds)
            await fleet.Heartbeat(
                fleet_pb2.HeartbeatRequest(node_id="echo", boot_id="1", load=worker_pb2.NodeLoad(store_ok=True))
            )


async def spans_of(stream: Any, is_token: Any) -> tuple[float, float, int]:
    """Seconds to the first token, mean seconds between tokens, and how many came."""
    began = time.perf_counter()
    times = []
    async for message in stream:
        n = is_token(message)
        times += [time.perf_counter()] * n
    return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1), len(times)


def direct(stub: Any, number: int, n_tokens: int, gap_us: int) -> Any:
    return stub.RunTurn(
        worker_pb2.RunTurnRequest(
            session_id=f"direct{number}",
            turn_id="t",
            epoch=1,
            coordinator_generation=1,
            token_ids=[1] * 30,
            n_prompt_tokens=30,
            max_tokens=n_tokens,
            sampling=common_pb2.SamplingSettings(seed=gap_us),
        )
    )


async def through(stub: Any, session: str, n_tokens: int, gap_us: int) -> Any:
    return stub.Generate(
        chat_pb2.GenerateRequest(
            session_id=session,
            messages=[chat_pb2.ChatMessage(role="user", content="Say something.")],
            max_tokens=n_tokens,
            sampling=common_pb2.SamplingSettings(seed=gap_us),
        )
    )


async def measure(coordinator: str, worker: str, pid: int, n_streams: int, n_idle: int) -> None:
    """Alone, then in a crowd."""
    async with (
        grpc.aio.insecure_channel(coordinator, options=channel_options()) as to_coordinator,
        grpc.aio.insecure_channel(worker, options=channel_options()) as to_worker,
    ):
        chat = chat_pb2_grpc.ChatServiceStub(to_coordinator)
        node = worker_pb2_grpc.WorkerServiceStub(to_worker)

        async def session() -> str:
            return (await chat.CreateSession(chat_pb2.CreateSessionRequest())).session.session_id

        gap_us = int(TOKEN_S * 1e6)
        firsts: dict[str, list[float]] = {"direct": [], "through": []}
        gaps: dict[str, list[float]] = {"direct": [], "through": []}
        for number in range(40):
            one = await spans_of(direct(node, number, 16, gap_us), lambda m: len(m.tokens.tokens))
            two = await spans_of(
                await through(chat, await session(), 16, gap_us), lambda m: int(m.event.HasField("token"))
            )
            for name, spans in (("direct", one), ("through", two)):
                firsts[name].append(spans[0])
                gaps[name].append(spans[1])
        first = {name: statistics.median(found) * 1e3 for name, found in firsts.items()}
        gap = {name: statistics.median(found) * 1e3 for name, found in gaps.items()}
        click.echo(
            f"first token: direct {first['direct']:.2f} ms, through the coordinator {first['through']:.2f} ms, "
            f"{first['through'] - first['direct']:+.2f} ms at the median"
        )
        click.echo(
            f"per token:   direct {gap['direct']:.3f} ms, through the coordinator {gap['through']:.3f} ms, "
            f"{gap['through'] - gap['direct']:+.3f} ms"
        )
        await asyncio.gather(*(session() for _ in range(n_idle)))
        sessions = [await session() for _ in range(n_streams)]
        burst = await asyncio.gather(*(crowd(chat, name, 20, SOAK_GAP_US) for name in sessions))
        burst_s = sorted(first for first, _ in burst)
        alone = await asyncio.gather(
            *(
                spans_of(direct(node, 1000 + n, 20, SOAK_GAP_US), lambda m: len(m.tokens.tokens))
                for n in range(n_streams)
            )
        )
        alone_s = sorted(first for first, *_ in alone)
        click.echo(
            f"{n_streams} turns at once, {1e6 / SOAK_GAP_US:.0f} tokens/s each: first tokens after "
            f"{statistics.median(burst_s) * 1e3:.0f} ms at the median and {burst_s[-1] * 1e3:.0f} ms at most; direct "
            f"{statistics.median(alone_s) * 1e3:.0f} and {alone_s[-1] * 1e3:.0f} ms"
        )
        process = psutil.Process(pid)
        before, cpu = process.memory_info().rss, process.cpu_times().user + process.cpu_times().system
        began = time.perf_counter()
        found = await asyncio.gather(*(crowd(chat, name, 300, 0) for name in sessions))
        took = time.perf_counter() - began
        n_tokens = sum(n for _, n in found)
        used = process.cpu_times().user + process.cpu_times().system - cpu
        click.echo(
            f"{n_streams} streams beside {n_idle} idle sessions: {n_tokens / took:.0f} tokens/s; the coordinator's own "
            f"CPU time is enough for {n_tokens / used:.0f} tokens/s on one core; "
            f"first tokens after {statistics.median(first for first, _ in found) * 1e3:.0f} ms at the median; "
            f"memory {before / 1e6:.0f} to {process.memory_info().rss / 1e6:.0f} MB"
        )


async def soak(coordinator: str, pid: int, n_streams: int, minutes: float) -> None:
    """The coordinator's memory, minute by minute, while streams begin and end; each turn is a session of its own."""
    process, n_tokens = psutil.Process(pid), 0
    ends_at = time.monotonic() + 60 * minutes
    async with grpc.aio.insecure_channel(coordinator, options=channel_options()) as channel:
        chat = chat_pb2_grpc.ChatServiceStub(channel)

        async def keep_asking() -> None:
            nonlocal n_tokens
            while time.monotonic() < ends_at:
                created = await chat.CreateSession(chat_pb2.CreateSessionRequest())
                stream = await through(chat, created.session.session_id, 300, SOAK_GAP_US)
                _, _, n = await spans_of(stream, lambda m: int(m.event.HasField("token")))
                n_tokens += n

        asking = asyncio.gather(*(keep_asking() for _ in range(n_streams)))
        for minute in range(int(minutes) + 1):
            memory = process.memory_info().rss / 1e6
            click.echo(f"minute {minute:2d}: {memory:6.1f} MB, {process.num_fds()} files, {n_tokens} tokens so far")
            await asyncio.wait([asking], timeout=60)
        await asking


async def crowd(chat: Any, name: str, n_tokens: int, gap_us: int) -> tuple[float, int]:
    """Seconds to the first token of one stream among many, and how many tokens came."""
    first, _, n = await spans_of(await through(chat, name, n_tokens, gap_us), lambda m: int(m.event.HasField("token")))
    return first, n


def commit_ms(folder: Path) -> float:
    """Median of a commit to the disk that the coordinator writes to; a turn's first token waits for one."""
    database = sqlite3.connect(folder / "probe.sqlite3", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE t (x)")
    spans = []
    for number in range(40):
        began = time.perf_counter()
        database.execute("INSERT INTO t VALUES (?)", (number,))
        spans.append((time.perf_counter() - began) * 1e3)
    database.close()
    return statistics.median(spans)


@contextlib.contextmanager
def processes(folder: Path) -> Any:
    """A coordinator and an echo worker; yields their addresses and the coordinator's pid."""
    ready, worker_ready = folder / "ready", folder / "worker"
    log = (folder / "log").open("w")
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvferry.coordinator",
                "run",
                "--model",
                MODEL,
                "--listen",
                "127.0.0.1:0",
                "--state",
                str(folder / "state"),
                "--ready-file",
                str(ready),
                "--log-level",
                "error",
            ],
            stderr=log,
        )
    ]
    try:
        wait_for(ready)
        coordinator = json.loads(ready.read_text())
        running.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvferry.bench.coordinator",
                    "--serve",
                    coordinator["address"],
                    str(worker_ready),
                ],
                stderr=log,
            )
        )
        wait_for(worker_ready)
        yield coordinator["address"], worker_ready.read_text(), coordinator["pid"]
    finally:
        for process in running:
            process.kill()
            process.wait()
        log.close()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come up in a minute")
        time.sleep(0.05)


@click.command()
@click.option("--streams", default=100, show_default=True)
@click.option("--idle-sessions", default=500, show_default=True)
@click.option("--soak-minutes", default=0.0, show_default=True, help="Afterwards, keep the streams coming so long.")
@click.option("--serve", nargs=2, hidden=True, type=str)
def main(streams: int, idle_sessions: int, soak_minutes: float, serve: tuple[str, str] | None) -> None:
    """Print the figures, each beside its peer."""
    if serve is not None:
        asyncio.run(serve_worker(serve[0], Path(serve[1])))
        return
    with tempfile.TemporaryDirectory() as folder, processes(Path(folder)) as (coordinator, worker, pid):
        click.echo(
            f"a commit to this disk takes {commit_ms(Path(folder)):.2f} ms; a turn makes one before its first token"
        )
        asyncio.run(measure(coordinator, worker, pid, streams, idle_sessions))
        if soak_minutes:
            asyncio.run(soak(coordinator, pid, streams, soak_minutes))


if __name__ == "__main__":
    main()
