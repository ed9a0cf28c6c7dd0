"""What the engine bench runs: sizes, our own runner, and how two runners are measured side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import numpy as np

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.kv_cache import KvKind, KvSequence

CONTEXT: Final = 2304  # 2,048 and room to decode behind it
PASS_ROWS: Final = 512
MAX_BATCH: Final = 8
KV_BYTES: Final = 512 << 20


class Runner(Protocol):
    """One of the engines."""

    name: str

    def prefill(self, tokens: Sequence[int]) -> None:
        """All tokens from an empty cache, logits of the last."""

    def prepare_decode(self, tokens: Sequence[int]) -> None:
        """Rows of these tokens, which ``decode`` goes on from, each time anew. Not measured."""

    def decode(self, tokens: Sequence[int]) -> None:
        """One token after the other."""

    def prepare_batch(self, n_sequences: int) -> None:
        """Empty sequences to decode side by side. Not measured."""

    def decode_batch(self, tokens: Sequence[int], n_sequences: int) -> None:
        """Each token for every sequence, in one step."""

    def close(self) -> None:
        """Free everything."""


class Ours:
    """The engine of this project."""

    def __init__(self, path: Path, n_threads: int, kv: KvKind) -> None:
        options = EngineOptions(
            n_threads=n_threads, kv_bytes=KV_BYTES, max_batch_rows=PASS_ROWS, context_length=CONTEXT, kv=kv
        )
        self.name = f"kvferry, {kv} rows"
        self.engine = Engine.load(path, options)
        self._prefix = self.engine.new_sequence()
        self._sequences: list[KvSequence] = []

    def prefill(self, tokens: Sequence[int]) -> None:
        sequence = self.engine.new_sequence()
        self.engine.forward([Chunk(sequence, np.array(tokens, np.int32))])
        sequence.release()

    def prepare_decode(self, tokens: Sequence[int]) -> None:
        if self._prefix.n_rows != len(tokens):
            self._prefix.release()
            self._prefix = self.engine.new_sequence()
            if tokens:
                self.engine.forward([Chunk(self._prefix, np.array(tokens, np.int32), "none")])
        self._replace([self._prefix.fork(len(tokens))])

    def decode(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.engine.forward([Chunk(self._sequences[0], np.array([token], np.int32))])

    def prepare_batch(self, n_sequences: int) -> None:
        self._replace([self.engine.new_sequence() for _ in range(n_sequences)])

    def decode_batch(self, tokens: Sequence[int], n_sequences: int) -> None:
        for token in tokens:
            self.engine.forward(
                [Chunk(s, np.array([token + 3 * i], np.int32)) for i, s in enumerate(self._sequences[:n_sequences])]
            )

    def close(self) -> None:
        self._replace([])
        self._prefix.release()
        self.engine.close()

    def _replace(self, sequences: list[KvSequence]) -> None:
        for sequence in self._sequences:
            sequence.release()
        self._sequences = sequences


@dataclass(frozen=True)
class Task:
    """One line of the table. ``run`` is measured, ``prepare`` before it is not; ``n_tokens`` of one run."""

    name: str
    n_tokens: int
    prepare: Callable[[Runner], None]
    run: Callable[[Runner], None]


def _tokens(n: int) -> list[int]:
    return [100 + 7 * i % 40_000 for i in range(n)]


def prefill_task(n: int) -> Task:
    return Task(f"prefill {n}", n, lambda _: None, lambda runner: runner.prefill(_tokens(n)))


def decode_task(depth: int, n: int) -> Task:
    return Task(
        f"decode at depth {depth}",
        n,
        lambda runner: runner.prepare_decode(_tokens(depth)),
        lambda runner: runner.decode(_tokens(n)),
    )


def batch_task(n_sequences: int, n: int) -> Task:
    return Task(
        f"decode, batch of {n_sequences}",
        n * n_sequences,
        lambda runner: runner.prepare_batch(n_sequences),
        lambda runner: runner.decode_batch(_tokens(n), n_sequences),
    )


@dataclass
class Measured:
    """Tokens per second of each run: by the wall clock, and per second of processor time of the whole process."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def measure(runners: Sequence[Runner], task: Task, n_pairs: int) -> list[Measured]:
    """Let the runners take turns, so that noise hits all; the first round warms up and does not count."""
    results = [Measured() for _ in runners]
    for pair in range(n_pairs + 1):
        for runner, result in zip(runners, results, strict=True):
            task.prepare(runner)
            wall, cpu = time.perf_counter(), time.process_time()
            task.run(runner)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if pair > 0:
                result.wall.append(task.n_tokens / wall)
                result.cpu.append(task.n_tokens / cpu)
    return results


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the pairs' own ratios."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def weight_bytes_per_token(engine: Engine) -> int:
    """Bytes of packed weights that a decode reads: all of them, the embedding only as the head."""
    packed: Any = engine._packed  # noqa: SLF001 - a bench looks inside
    rope = engine.context_length * engine.config.head_dim * 4
    embedding = 0 if engine.config.tied_embeddings else engine.config.vocab_size * engine.config.hidden_size
    return int(packed.n_bytes) - rope - embedding


def products_per_token(engine: Engine) -> int:
    """Multiplications by a weight that one token of a prefill takes (the head runs for the last token only)."""
    c = engine.config
    query, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    return c.n_layers * (c.hidden_size * (2 * query + 2 * kv) + 3 * c.hidden_size * c.ffn_size)
