"""Routing by prediction beside sticky sessions, longest prefix first, and least loaded: three real nodes.

Nodes are processes with the demo's model, one thread and a fixed share of a core each, so that they are boards that
differ by two and do not feel each other. One coordinator after the other, each with its own rule, serves the same trace
of chats with shared system prompts: the same texts but for a first word that keeps the runs from sharing rows. Each
coordinator first sees some turns that do not count, so that it knows the nodes' rates as it would an hour later. The
rules take turns in who goes first, a round for each seed. Prints the mean time from the client's call to its first
token under each rule, and how far the predictions were off.

    python -m kvferry.bench.routing_real [--trace chat] [--sessions 12] [--seed 1] [--seed 2]
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import grpc.aio

from kvferry.bench.cpu_share import cpu_shares
from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.coordinator.opening import open_registry
from kvferry.coordinator.routing import Rule
from kvferry.coordinator.server import serve
from kvferry.drills.process import ManagedProcess
from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc
from kvferry.simulator.rules import RULES
from kvferry.simulator.trace import Kind, SessionPlan, TurnPlan, drawn

MODEL: Final = "smollm2-135m"
CORES: Final = (0.42, 0.6, 0.3)
"""Of the nodes; the middle one is the first by name, which rules that see equals prefer. The rest of two cores is for
the coordinator and the client."""

KINDS: Final[dict[str, tuple[Kind, float]]] = {
    "chat": (Kind(n_systems=3, system_tokens=900, n_turns=4, prompt_tokens=50, answer_tokens=12, think_s=1.5), 0.6),
    "hot": (
        Kind(
            n_systems=4, system_tokens=1_100, n_turns=4, prompt_tokens=50, answer_tokens=12, think_s=1.5, hot_share=0.8
        ),
        0.6,
    ),
    "bursts": (
        Kind(n_systems=3, system_tokens=600, n_turns=3, prompt_tokens=60, answer_tokens=12, think_s=1.5, burst=4),
        0.6,
    ),
    "documents": (
        Kind(n_systems=2, system_tokens=100, n_turns=3, prompt_tokens=300, answer_tokens=12, think_s=2.0),
        0.4,
    ),
}
"""Traffic, and new sessions per second of all nodes together, which are then busy for about half of the time."""

WARM_UP_WAVES: Final = 3
"""Of a turn for each node, so that each has had one by itself; of prompts of three lengths."""

WORDS: Final = ("the", "lamp", "of", "a", "keeper", "who", "counts", "every", "ship", "at", "night", "until", "dawn")


@dataclasses.dataclass(slots=True)
class Result:
    """Of one rule."""

    first_token_s: list[float] = dataclasses.field(default_factory=list)
    n_moves: int = 0
    n_tokens: int = 0
    n_computed: int = 0
    # |predicted - actual| / actual, from the placement to the first token.
    errors: list[float] = dataclasses.field(default_factory=list)
    placed: list[chat_pb2.Placement] = dataclasses.field(default_factory=list)

    def add(self, other: Result) -> None:
        """Another round's."""
        self.first_token_s += other.first_token_s
        self.errors += other.errors
        self.placed += other.placed
        self.n_moves += other.n_moves
        self.n_tokens += other.n_tokens
        self.n_computed += other.n_computed

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.first_token_s)

    @property
    def line(self) -> str:
        """For a person."""
        return (
            f"first token {self.mean_s:6.3f} s, median {statistics.median(self.first_token_s):6.3f} s, "
            f"{self.n_computed / self.n_tokens:4.0%} computed, {self.n_moves:3} moves, "
            f"foreseen to {statistics.median(self.errors):4.0%}"
        )


class Fleet:
    """The nodes: they outlive the coordinators, and follow each newer one."""

    def __init__(self, folder: Path, address: str) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self.nodes = [
            ManagedProcess(
                f"node-{number}",
                [
                    *("node", "run", "--model", MODEL, "--coordinator", address, "--node-id", f"node-{number}"),
                    *("--store", str(self.store), "--listen", "127.0.0.1:0", "--threads", "1"),
                    *("--kv-memory", "384MiB", "--context", "2048", "--ready-file", str(folder / f"{number}.ready")),
                ],
                folder / f"{number}.ready",
                folder / f"{number}.log",
            )
            for number in range(len(CORES))
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[bool]:
        """From when all are ready; yields whether each has its own share of a core."""
        try:
            for node in self.nodes:
                node.start()
            for node in self.nodes:
                node.wait_ready()
            with cpu_shares({node.pid: cores for node, cores in zip(self.nodes, CORES, strict=True)}) as shared:
                yield shared
        finally:
            for node in self.nodes:
                node.stop(10.0)


class Replay:
    """One trace through one coordinator."""

    def __init__(self, stub: chat_pb2_grpc.ChatServiceAsyncStub, salt: str, seed: int) -> None:
        self._stub, self._salt, self._seed = stub, salt, seed
        self.result = Result()

    async def run(self, trace: Sequence[SessionPlan]) -> None:
        began = time.monotonic()
        await asyncio.gather(*(self._session(number, plan, began) for number, plan in enumerate(trace)))

    async def warm_up(self) -> None:
        """Each node has had some turns by itself then; they do not count."""
        for wave in range(WARM_UP_WAVES):
            plans = [
                SessionPlan(0.0, system, 200 * (1 + wave), (TurnPlan(50, 4, 0.0),)) for system in range(len(CORES))
            ]
            await Replay(self._stub, f"{self._salt} before {wave}", wave).run(plans)

    async def _session(self, number: int, plan: SessionPlan, began: float) -> None:
        rng = random.Random(f"{self._seed} {number}")
        session_id = f"{self._salt}-{number}".replace(" ", "-")
        await self._stub.CreateSession(chat_pb2.CreateSessionRequest(session_id=session_id))
        await asyncio.sleep(max(0.0, plan.start_s - (time.monotonic() - began)))
        node = ""
        for n, turn in enumerate(plan.turns):
            messages = [chat_pb2.ChatMessage(role="user", content=words(turn.prompt_tokens, rng))]
            if n == 0:
                shared = f"{self._salt} {words(plan.system_tokens, random.Random(f'system {plan.system}'))}"
                messages.insert(0, chat_pb2.ChatMessage(role="system", content=shared))
            request = chat_pb2.GenerateRequest(
                session_id=session_id, turn_id=f"t{n}", messages=messages, max_tokens=turn.answer_tokens
            )
            placed = await self._turn(request)
            self.result.n_moves += node not in {"", placed.node_id}
            node = placed.node_id
            await asyncio.sleep(turn.think_s)
        kept = await self._stub.GetSession(chat_pb2.GetSessionRequest(session_id=session_id))
        for placed in (turn.placements[-1] for turn in kept.turns):
            actual_s = placed.first_token_seconds
            self.result.errors.append(abs(placed.predicted_seconds - actual_s) / actual_s)
            self.result.placed.append(placed)

    async def _turn(self, request: chat_pb2.GenerateRequest) -> chat_pb2.Placement:
        asked = time.perf_counter()
        placed, first_s = chat_pb2.Placement(), 0.0
        async for message in self._stub.Generate(request):
            event = message.event
            if event.HasField("placed"):
                placed = event.placed
            elif event.HasField("token") and not first_s:
                first_s = time.perf_counter() - asked
        self.result.first_token_s.append(first_s)
        self.result.n_tokens += placed.prefix.n_tokens
        self.result.n_computed += placed.prefix.n_computed
        return placed


def words(n: int, rng: random.Random) -> str:
    """About so many tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(n))


@contextlib.asynccontextmanager
async def coordinator(
    settings: CoordinatorSettings, model: LoadedModel, rule: Rule
) -> AsyncIterator[chat_pb2_grpc.ChatServiceAsyncStub]:
    """In this process; from when all nodes are its own."""
    async with (
        open_registry(settings) as registry,
        serve(settings, [model], registry, rule) as address,
        grpc.aio.insecure_channel(address, options=channel_options()) as channel,
    ):
        stub: chat_pb2_grpc.ChatServiceAsyncStub = chat_pb2_grpc.ChatServiceStub(channel)
        async with asyncio.timeout(60):
            while len((await stub.ListNodes(chat_pb2.ListNodesRequest())).nodes) < len(CORES):  # noqa: ASYNC110 - RPCs
                await asyncio.sleep(0.1)
        yield stub


async def compare(folder: Path, kind: str, n_sessions: int, seed: int, port: int) -> dict[str, Result]:
    """Every rule in turn, over the same nodes; the seed says which one begins."""
    traffic, rate = KINDS[kind]
    trace = drawn(traffic, n_sessions, rate, random.Random(seed))
    model = await asyncio.to_thread(LoadedModel.load, MODEL)
    fleet = Fleet(folder, f"127.0.0.1:{port}")
    results: dict[str, Result] = {}
    with fleet.running() as shared:
        if not shared:
            click.echo(
                "these nodes share all cores, since no cpu controller could be used: a busy one is no slow board"
            )
        rules = list(RULES.items())
        for name, make_rule in rules[seed % len(rules) :] + rules[: seed % len(rules)]:
            settings = CoordinatorSettings(
                model=(MODEL,),
                listen=f"127.0.0.1:{port}",
                state=folder / name.replace(" ", "-"),
                store=str(fleet.store),
            )
            async with coordinator(settings, model, make_rule()) as stub:
                replay = Replay(stub, name, seed)
                await replay.warm_up()
                await replay.run(trace)
            results[name] = replay.result
    return results


@click.command()
@click.option("--trace", "kinds", multiple=True, default=list(KINDS), type=click.Choice(list(KINDS)))
@click.option("--sessions", default=12, show_default=True)
@click.option("--seed", "seeds", multiple=True, default=[1, 2], show_default=True, help="A round for each.")
@click.option("--port", default=7471, show_default=True)
@click.option("--each", is_flag=True, help="Every placement as well: what was predicted, and what came.")
def main(kinds: Sequence[str], sessions: int, seeds: Sequence[int], port: int, *, each: bool) -> None:
    """Print a line for each rule of each trace."""
    ratios: dict[str, list[float]] = {name: [] for name in RULES if name != "predicted"}
    for kind in kinds:
        results = {name: Result() for name in RULES}
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
                found = asyncio.run(compare(Path(folder), kind, sessions, seed, port))
            for name, result in found.items():
                results[name].add(result)
        ours = results["predicted"].mean_s
        click.echo(f"{kind}: {len(seeds)} x {sessions} sessions, {len(results['predicted'].first_token_s)} turns")
        for name, result in results.items():
            ratio = ours / result.mean_s
            if name in ratios:
                ratios[name].append(ratio)
            click.echo(f"  {name:15} {result.line}, predicted is {ratio:4.2f} x")
        if each:
            click.echo("\n".join(placement_line(p) for p in results["predicted"].placed))
    for name, found_ratios in ratios.items():
        click.echo(
            f"against {name}: geometric mean {statistics.geometric_mean(found_ratios):.2f} x, "
            f"worst {max(found_ratios):.2f} x"
        )


def placement_line(placed: chat_pb2.Placement) -> str:
    """Milliseconds and rows, foreseen and as they came."""
    best = next(c for c in placed.candidates if c.chosen)
    found = placed.prefix
    return (
        f"    {placed.node_id} {1e3 * placed.predicted_seconds:6.0f} {1e3 * placed.first_token_seconds:6.0f} ms  "
        f"queue {1e3 * best.queue_seconds:5.0f} {1e3 * found.queue_seconds:5.0f}  "
        f"restore {1e3 * best.restore_seconds:5.0f} {1e3 * found.restore_seconds:5.0f}  "
        f"prefill {1e3 * best.prefill_seconds:5.0f} {1e3 * found.prefill_seconds:5.0f}  "
        f"rows {found.n_resident} {found.n_restored} {found.n_computed}, foreseen {best.n_restored} {best.n_computed}; "
        f"{best.n_running} running"
    )


if __name__ == "__main__":
    main()
