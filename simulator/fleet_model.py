"""Boards as the planner sees them: rates, memory, a batch of turns. No tokens are made; what is tracked is how many
rows lie where, and how long everything takes.

A board prefills its admitted turns in equal shares; one that begins with a system prompt that another is computing
waits for it, as in the node's scheduler. Beside decodes a step takes prompt rows only until it is ``decode_slowdown``
times as long as without them, which leaves the prompts ``decode_drag`` times slower than alone, as the node's pacer
does. A batch decodes as fast as one turn until its rows cost more than the weights do. A board reads from the store
one turn after the other; the store itself can give only so much to all boards together.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoardRates:
    """As measured on one board."""

    prefill_tokens_per_s: float
    # Attention costs as much as the weights at this depth.
    half_speed_depth: float
    decode_tokens_per_s: float
    # Prefill beside decodes is this much slower, and decoding beside prefill.
    decode_drag: float
    decode_slowdown: float
    read_bytes_per_s: float
    read_latency_s: float
    bytes_per_row: int
    memory_rows: int
    max_running: int = 8

    def prefill_seconds(self, n_reused: int, n_tokens: int) -> float:
        each = 1 / self.prefill_tokens_per_s
        return each * ((n_tokens - n_reused) + (n_tokens**2 - n_reused**2) / 2 / self.half_speed_depth)

    def decode_seconds(self, n_turns: int) -> float:
        """Of a step with a token for each of these turns."""
        return max(1 / self.decode_tokens_per_s, n_turns / self.prefill_tokens_per_s)

    def scaled(self, factor: float) -> BoardRates:
        """A board that computes ``factor`` times as fast."""
        return dataclasses.replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s * factor,
            decode_tokens_per_s=self.decode_tokens_per_s * factor,
        )


BOARD_2B = BoardRates(
    prefill_tokens_per_s=30.0, half_speed_depth=16_000.0, decode_tokens_per_s=6.0, decode_drag=2.1,
    decode_slowdown=2.5, read_bytes_per_s=110e6, read_latency_s=0.03, bytes_per_row=229_380,
    memory_rows=24_000,
)  # fmt: skip
"""A 2B model on a board with four fast cores and gigabit Ethernet: calculated from its memory bandwidth and
instruction rate (kernels.md, reliability.md section 0), but for drag and slowdown, which were measured with another
model on another machine (BENCHMARKS.md)."""


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One turn on a board."""

    session: int
    system: int
    system_tokens: int
    n_tokens: int
    answer_tokens: int
    arrived_s: float
    recompute: bool
    predicted_s: float = 0.0
    n_resident: int = 0
    n_restored: int = 0
    admitted_s: float = 0.0
    restored_s: float = 0.0
    work_s: float = 0.0
    first_token_s: float = 0.0
    tokens_left: float = 0.0
    ends_s: float = 0.0

    @property
    def n_computed(self) -> int:
        return self.n_tokens - max(self.n_resident, self.n_restored)


class SharedStore:
    """What is on the server, in rows, and how busy its link is."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.n_bytes_read = 0
        self._free_s = 0.0
        self._sessions: dict[int, int] = {}
        self._systems: set[int] = set()

    def rows_for(self, session: int, system: int, system_tokens: int) -> int:
        shared = system_tokens if system in self._systems else 0
        return max(self._sessions.get(session, 0), shared)

    def publish(self, session: int, system: int, n_rows: int) -> None:
        self._sessions[session] = n_rows
        self._systems.add(system)

    def read(self, n_bytes: int, alone_s: float, now_s: float) -> float:
        """When a read that would take ``alone_s`` on an idle network is done."""
        self.n_bytes_read += n_bytes
        self._free_s = max(self._free_s, now_s) + n_bytes / self.bytes_per_s
        return max(now_s + alone_s, self._free_s)


class ModelBoard:
    """One board; time goes forward by ``advance``."""

    def __init__(self, name: str, rates: BoardRates, store: SharedStore) -> None:
        self.name, self.rates, self._store = name, rates, store
        # session → rows, least recently used first
        self.memory: OrderedDict[int, int] = OrderedDict()
        # system → sessions in memory that begin with it
        self.systems: dict[int, int] = {}
        # The same, as a node names sessions in its heartbeats.
        self.named: dict[str, int] = {}
        self._owner: dict[int, int] = {}
        self.queue: deque[Job] = deque()
        self.reading: list[Job] = []
        self.prefilling: list[Job] = []
        self.decoding: list[Job] = []
        self._n_rows = 0
        self._io_free_s = 0.0
        self._now_s = 0.0

    @property
    def n_running(self) -> int:
        return len(self.reading) + len(self.prefilling) + len(self.decoding)

    @property
    def n_turns(self) -> int:
        return self.n_running + len(self.queue)

    def rows_for(self, session: int, system: int, system_tokens: int) -> int:
        shared = system_tokens if self.systems.get(system) else 0
        return max(self.memory.get(session, 0), shared)

    def submit(self, job: Job, now_s: float) -> None:
        self.queue.append(job)
        self._admit(now_s)

    def next_s(self) -> float:
        """When something will happen by itself; infinite when nothing will."""
        times = [j.restored_s for j in self.reading]
        if self.decoding:
            times.append(self._now_s + max(0.0, min(j.tokens_left for j in self.decoding)) * self._token_s())
        if self.prefilling:
            least = min(j.work_s for j in self.prefilling)
            times.append(self._now_s + least * len(self.prefilling) * self._drag())
        return min(times, default=float("inf"))

    def advance(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """Up to ``now_s``, at most ``next_s``: turns that got their first token, and turns that ended."""
        if self.prefilling:
            share_s = (now_s - self._now_s) / len(self.prefilling) / self._drag()
            for job in self.prefilling:
                job.work_s -= share_s
        if self.decoding:
            n_tokens = (now_s - self._now_s) / self._token_s()
            for job in self.decoding:
                job.tokens_left -= n_tokens
        self._now_s = now_s
        self._end_reads()
        return self._move_on()

    def _end_reads(self) -> None:
        for job in [j for j in self.reading if j.restored_s <= self._now_s + 1e-9]:
            self.reading.remove(job)
            self.prefilling.append(job)

    def _move_on(self) -> tuple[list[Job], list[Job]]:
        """Whoever has nothing left to compute or to say: to the decodes, and out."""
        now_s = self._now_s
        started = [j for j in self.prefilling if j.work_s <= 1e-9]
        for job in started:
            self.prefilling.remove(job)
            job.first_token_s = now_s
            job.tokens_left = job.answer_tokens
            self.decoding.append(job)
            self._keep(job, job.n_tokens)
        ended = [j for j in self.decoding if j.tokens_left <= 1e-6]
        for job in ended:
            self.decoding.remove(job)
            job.ends_s = now_s
            self._keep(job, job.n_tokens + job.answer_tokens - 1)
            self._store.publish(job.session, job.system, job.n_tokens + job.answer_tokens - 1)
        if ended or started:
            self._admit(now_s)
        return started, ended

    def _drag(self) -> float:
        return self.rates.decode_drag if self.decoding else 1.0

    def _token_s(self) -> float:
        """Seconds between two tokens of each turn that decodes."""
        slowdown = self.rates.decode_slowdown if self.prefilling else 1.0
        return self.rates.decode_seconds(len(self.decoding)) * slowdown

    def _admit(self, now_s: float) -> None:
        for job in list(self.queue):
            if self.n_running >= self.rates.max_running:
                break
            if self._is_being_computed(job):
                continue
            self.queue.remove(job)
            job.admitted_s = now_s
            in_memory = self.rows_for(job.session, job.system, job.system_tokens)
            job.n_resident = min(in_memory, job.n_tokens - 1)
            stored = min(self._store.rows_for(job.session, job.system, job.system_tokens), job.n_tokens - 1)
            job.restored_s = now_s
            if stored >= job.n_resident + 32 and not job.recompute:
                n_bytes = stored * self.rates.bytes_per_row
                alone_s = self.rates.read_latency_s + n_bytes / self.rates.read_bytes_per_s
                job.n_restored, job.n_resident = stored, 0
                job.restored_s = self._store.read(n_bytes, alone_s, max(now_s, self._io_free_s))
                self._io_free_s = job.restored_s
            job.work_s = self.rates.prefill_seconds(job.n_tokens - job.n_computed, job.n_tokens)
            (self.reading if job.restored_s > now_s else self.prefilling).append(job)

    def _is_being_computed(self, job: Job) -> bool:
        """The system prompt that it lacks, and would not read, by another turn."""
        has = self.rows_for(job.session, job.system, job.system_tokens)
        if not job.recompute:
            has = max(has, self._store.rows_for(job.session, job.system, job.system_tokens))
        return has < job.system_tokens and any(j.system == job.system for j in self.prefilling)

    def _keep(self, job: Job, n_rows: int) -> None:
        """In memory; the least recently used go for it."""
        self._forget(job.session, job.system)
        self.memory[job.session] = n_rows
        self.named[f"s{job.session}"] = n_rows
        self._owner[job.session] = job.system
        self.systems[job.system] = self.systems.get(job.system, 0) + 1
        self._n_rows += n_rows
        while self._n_rows > self.rates.memory_rows and len(self.memory) > 1:
            oldest = next(iter(self.memory))
            self._forget(oldest, self._owner[oldest])

    def _forget(self, session: int, system: int) -> None:
        n_rows = self.memory.pop(session, None)
        if n_rows is not None:
            del self.named[f"s{session}"]
            self._n_rows -= n_rows
            self.systems[system] -= 1
