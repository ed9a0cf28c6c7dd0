"""What the engine bench runs: tasks, our own runner, and how runners are measured side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, Literal, Protocol

import numpy as np

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kv_cache import KvKind, KvSequence
from kvferry.engine.packing import plan_weights

CONTEXT: Final = 2304  # 2,048 and room to decode behind it
PASS_ROWS: Final = 512
MAX_BATCH: Final = 8
KV_BYTES: Final = 1 << 30  # taken where it is written

_CLEARLY_SLOWER: Final = 0.9  # in the first round: a setting that is dropped


@dataclass(frozen=True)
class Task:
    """One line of the table.

    prefill: ``n_tokens`` from an empty cache, logits of the last. decode: so many, one after the other, behind
    ``depth`` tokens. batch: so many for each of ``n_sequences``, a token of all in one step.
    """

    kind: Literal["prefill", "decode", "batch"]
    n_tokens: int
    depth: int = 0
    n_sequences: int = 1

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.n_tokens}"
        if self.kind == "decode":
            return f"decode at depth {self.depth}"
        return f"decode, batch of {self.n_sequences}"

    @property
    def n_counted(self) -> int:
        """Tokens of one run."""
        return self.n_tokens * self.n_sequences


def prefill_task(n: int) -> Task:
    return Task("prefill", n)


def decode_task(depth: int, n: int) -> Task:
    return Task("decode", n, depth=depth)


def batch_task(n_sequences: int, n: int) -> Task:
    return Task("batch", n, n_sequences=n_sequences)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one run: by the wall clock, and per second of the whole process's processor time."""

    wall: float
    cpu: float


class Runner(Protocol):
    """One of the engines, with its settings."""

    name: str

    def can(self, task: Task) -> bool:
        """Whether it has such a thing."""

    def run(self, task: Task) -> Speed:
        """Do it once. What must be there before (a context, rows to decode behind) does not count."""

    def close(self) -> None:
        """Free everything."""


def timed(n_tokens: int, work: Callable[[], object]) -> Speed:
    """Run it in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Speed(n_tokens / wall, n_tokens / cpu)


def tokens_of(n: int) -> list[int]:
    return [100 + 7 * i % 40_000 for i in range(n)]


class Ours:
    """The engine of this project."""

    def __init__(self, path: Path, n_threads: int, kv: KvKind) -> None:
        options = EngineOptions(
            n_threads=n_threads, kv_bytes=KV_BYTES, max_batch_rows=PASS_ROWS, context_length=CONTEXT, kv=kv
        )
        self.name = f"kvferry, {kv} rows"
        self.engine = Engine.load(path, options)
        self._prefix = self.engine.new_sequence()

    def can(self, task: Task) -> bool:  # noqa: ARG002 - all
        return True

    def run(self, task: Task) -> Speed:
        if task.kind == "decode":
            self._go_to(task.depth)
        sequences = [
            self._prefix.fork(task.depth) if task.kind == "decode" else self.engine.new_sequence()
            for _ in range(task.n_sequences)
        ]
        work = self._prefill if task.kind == "prefill" else self._decode
        speed = timed(task.n_counted, lambda: work(sequences, tokens_of(task.n_tokens)))
        for sequence in sequences:
            sequence.release()
        return speed

    def close(self) -> None:
        self._prefix.release()
        self.engine.close()

    def _go_to(self, depth: int) -> None:
        if self._prefix.n_rows != depth:
            self._prefix.release()
            self._prefix = self.engine.new_sequence()
            if depth:
                self.engine.forward([Chunk(self._prefix, np.array(tokens_of(depth), np.int32), "none")])

    def _prefill(self, sequences: Sequence[KvSequence], tokens: Sequence[int]) -> None:
        self.engine.forward([Chunk(sequences[0], np.array(tokens, np.int32))])

    def _decode(self, sequences: Sequence[KvSequence], tokens: Sequence[int]) -> None:
        for token in tokens:
            self.engine.forward([Chunk(s, np.array([token + 3 * i], np.int32)) for i, s in enumerate(sequences)])


@dataclass
class Measured:
    """Tokens per second of each counted run of one runner."""

    name: str = ""
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, speed: Speed) -> None:
        self.wall.append(speed.wall)
        self.cpu.append(speed.cpu)


def measure(
    groups: Sequence[Sequence[Runner]], task: Task, n_pairs: int, beside: Callable[[], None] | None = None
) -> list[list[Measured]]:
    """Let all runners take turns, so that noise hits all. Returns the figures of each group's runners.

    A group is one engine and file with several settings. The first round warms up and does not count; a setting that is
    clearly slower than its group's best is left out afterwards. ``beside`` is called once in every round, before it.
    """
    if beside is not None:
        beside()
    first = [[runner.run(task) for runner in group] for group in groups]
    kept = [
        [
            runner
            for runner, speed in zip(group, speeds, strict=True)
            if speed.cpu >= _CLEARLY_SLOWER * max(s.cpu for s in speeds)
        ]
        for group, speeds in zip(groups, first, strict=True)
    ]
    results = [[Measured(runner.name) for runner in group] for group in kept]
    for _ in range(n_pairs):
        if beside is not None:
            beside()
        for group, figures in zip(kept, results, strict=True):
            for runner, measured in zip(group, figures, strict=True):
                measured.add(runner.run(task))
    return results


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the pairs' own ratios."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Work:
    """What one token costs: ``weight_bytes`` that a decode reads, ``products`` by a weight that a prefill takes (the
    head runs for the last token only)."""

    weight_bytes: int
    products: int

    @classmethod
    def of(cls, path: Path) -> Work:
        """By the plan that the engine packs the model's weights to."""
        plan = plan_weights(open_model(path))
        moe = plan.config.moe
        n_bytes = n_products = 0
        for part in plan.parts:
            n_tensors = min(len(part.tensors), moe.n_active) if moe is not None else len(part.tensors)
            if part.name == "embedding" and not plan.config.tied_embeddings:
                continue
            n_bytes += part.tensor_bytes * n_tensors
            if part.kind is not None and part.name not in {"embedding", "head"}:
                n_products += part.shape[0] * part.shape[1] * n_tensors
        return cls(n_bytes, n_products)
