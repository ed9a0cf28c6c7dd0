"""One seeded hour of a cluster's worst luck, compressed: faults until a moment, then calm, then the verdict."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from kvferry.coordinator.errors import CoordinatorError
from kvferry.coordinator.memory_registry import Ledger
from kvferry.simulator import virtual_time
from kvferry.simulator.board import Board, Speed, Unreachable
from kvferry.simulator.client import SimulatedClient
from kvferry.simulator.coordinator import NAMES, SimulatedCoordinator
from kvferry.simulator.history import History, check
from kvferry.simulator.network import Network
from kvferry.simulator.store import SimulatedStore

STORM_S: Final = 14.0
CALM_S: Final = 90.0
"""After the last fault everything must come to its end within this: the longest pauses of a turn in trouble add up."""

SOMETIMES: Final = (
    "failover in prefill", "failover at the first token", "failover at the last token", "node lost during a save",
    "double failover", "epoch refused", "duplicate dropped", "FNV collision",
    "candidate evicted between route and load",
    "ESTALE", "clock jump", "coordinator restart in failover", "drain with a zombie", "restore abandoned as too slow",
    "a zombie spoke to nobody", "one-way partition", "engine hung", "disk of the registry failed",
    "turn taken over from another coordinator", "read through another coordinator",
    "coordinator's lease ended while it lived", "session made anew under its name",
)  # fmt: skip
"""What a suite of seeds has to reach, or it proves less than it says (reliability.md section 11)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    seed: int
    problems: tuple[str, ...]
    sometimes: Counter[str]
    fingerprint: int
    virtual_s: float
    n_tokens: int


class Storm:
    """A cluster and everything that befalls it, drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        self.sometimes: Counter[str] = Counter()
        self.history = History()
        self.ledger = Ledger()
        self.network = Network(self.rng, self.sometimes)
        self.store = SimulatedStore(self.rng, self.sometimes)
        self.boards: dict[str, Board] = {}
        # A third of the storms has two coordinators over one registry.
        self.names = NAMES[: 2 if seed % 3 == 2 else 1]
        self.coordinators: dict[str, SimulatedCoordinator] = {}
        self._n_boots: Counter[str] = Counter()
        self._speeds: dict[str, Speed] = {}
        self._wall_offset_ms = 0
        self._is_calm = False
        self._reorders = 0

    async def run(self) -> None:
        """The whole story."""
        rng = self.rng
        for name in self.names:
            await self._start_coordinator(name)
        for number in range(rng.choice([2, 3, 3, 4])):
            name = f"n{number}"
            self._speeds[name] = Speed(rng.choice([200.0, 400.0, 800.0]), rng.uniform(0.02, 0.12))
            self._boot(name)
        self.network.chances.duplicate = rng.choice([0.0, 0.02, 0.1])
        self.network.chances.slow = rng.choice([0.0, 0.01, 0.05])
        self.store.stale_chance = rng.choice([0.0, 0.1])
        self.store.collision_chance = rng.choice([0.0, 0.1])
        clients = [
            asyncio.create_task(
                SimulatedClient(f"s{n}", rng, self.history, self.sometimes, self._asked).run(
                    rng.choice([1, 2, 3]), begins_anew=n == 1
                )
            )
            for n in range(rng.choice([2, 3, 5]))
        ]
        await self._faults()
        await self._calm()
        _, late = await asyncio.wait(clients, timeout=CALM_S)
        for task in late:
            self.history.violations.append("a client still waits long after the last fault")
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for coordinator in self.coordinators.values():
            await coordinator.crash()

    # The good parts.

    def _asked(self, name: str = "") -> SimulatedCoordinator | None:
        """The coordinator of that name, or any that is there."""
        there = [c for c in self.coordinators.values() if c.is_alive]
        named = [c for c in there if c.name == name]
        return self.rng.choice(named or there) if there else None

    def _board_at(self, address: str) -> Board | None:
        board = self.boards.get(address.partition(":")[0])
        return board if board is not None and board.address == address and not board.is_dead else None

    def _boot(self, name: str) -> None:
        self._n_boots[name] += 1
        self.boards[name] = Board(
            name, self._n_boots[name], self._speeds[name], self.network, self.store, self._call, self.names
        )

    async def _start_coordinator(self, name: str) -> None:
        coordinator = SimulatedCoordinator(
            name, self.ledger, self.network, self.store, self.rng, self._board_at, lambda: self._wall_offset_ms,
            self._reorder, is_shared=len(self.names) > 1,
        )  # fmt: skip
        await coordinator.start()
        self.coordinators[name] = coordinator

    async def _call(self, node_id: str, name: str, method: str, request: object) -> Any:
        """From a board to a coordinator and back; a call may take effect and its answer be lost."""
        try:
            async with asyncio.timeout(1.0):
                await self.network.carry(node_id, name)
                for _ in range(self.network.n_copies()):
                    coordinator = self.coordinators.get(name)
                    if coordinator is None or not coordinator.is_alive:
                        raise Unreachable(method)
                    answer = await coordinator.answer(method, request)
                await self.network.carry(name, node_id)
                return answer
        except (TimeoutError, CoordinatorError) as e:
            raise Unreachable(method) from e

    def _reorder(self) -> bool:
        if self._is_calm or self._reorders or self.rng.random() > 0.02:
            return False
        self._reorders += 1
        self.sometimes["messages reordered"] += 1
        return True

    # The bad parts.

    async def _faults(self) -> None:
        loop = asyncio.get_running_loop()
        kinds = [
            self._kill, self._kill, self._power_cut, self._freeze, self._freeze, self._cut, self._cut_one_way,
            self._hang,
            self._slow_board, self._slow_store, self._evict, self._clock_jump, self._crash_coordinator, self._drain,
            self._sleepy_coordinator, self._full_disk, self._drop_everything, self._end_lease,
        ]  # fmt: skip
        ends: list[asyncio.Task[None]] = []
        while loop.time() < STORM_S:
            await asyncio.sleep(self.rng.expovariate(0.7))
            fault = self.rng.choice(kinds)
            ends.append(asyncio.create_task(fault()))
        await asyncio.gather(*ends)

    async def _calm(self) -> None:
        """Everything is well from now on."""
        self._is_calm = True
        self.network.heal_all()
        self.network.chances.duplicate = self.network.chances.slow = 0.0
        self.store.seconds_per_row = 0.0002
        for name, board in self.boards.items():
            board.thaw()
            board.unhang_engine()
            board.slowness = 1.0
            if board.is_dead:
                self._boot(name)
        for coordinator in list(self.coordinators.values()):
            coordinator.disk_fails = False
            if not coordinator.is_alive:
                await self._start_coordinator(coordinator.name)

    def _victim(self) -> Board | None:
        """A board that lives, rather one that works."""
        living = [b for b in self.boards.values() if not b.is_dead]
        working = [b for b in living if b.runs or b.is_saving]
        return self.rng.choice(working or living) if living else None

    async def _kill(self) -> None:
        await self._lose(kernel_lives=True)

    async def _power_cut(self) -> None:
        await self._lose(kernel_lives=False)

    async def _lose(self, *, kernel_lives: bool) -> None:
        if (board := self._victim()) is None:
            return
        board.kill(kernel_lives=kernel_lives)
        await asyncio.sleep(self.rng.uniform(0.3, 6.0))
        if self.boards[board.node_id] is board:
            self._boot(board.node_id)

    async def _freeze(self) -> None:
        if (board := self._victim()) is not None:
            board.freeze()
            await asyncio.sleep(self.rng.choice([0.5, 4.0, 9.0]))
            board.thaw()

    async def _cut(self) -> None:
        if (board := self._victim()) is not None:
            name = self.rng.choice(self.names)
            for ends in ((board.node_id, name), (name, board.node_id)):
                self.network.cut(*ends)
            await asyncio.sleep(self.rng.choice([0.5, 2.0, 7.0]))
            for ends in ((board.node_id, name), (name, board.node_id)):
                self.network.heal(*ends)

    async def _cut_one_way(self) -> None:
        if (board := self._victim()) is not None:
            self.sometimes["one-way partition"] += 1
            name = self.rng.choice(self.names)
            ends = self.rng.choice([(board.node_id, name), (name, board.node_id)])
            self.network.cut(*ends)
            await asyncio.sleep(self.rng.choice([0.5, 2.0, 7.0]))
            self.network.heal(*ends)

    async def _hang(self) -> None:
        if (board := self._victim()) is not None:
            self.sometimes["engine hung"] += 1
            board.hang_engine()
            await asyncio.sleep(self.rng.choice([2.0, 9.0]))
            board.unhang_engine()

    async def _slow_board(self) -> None:
        if (board := self._victim()) is not None:
            board.slowness = 10.0
            await asyncio.sleep(self.rng.uniform(1.0, 6.0))
            board.slowness = 1.0

    async def _slow_store(self) -> None:
        self.store.seconds_per_row = 0.05
        await asyncio.sleep(self.rng.uniform(1.0, 5.0))
        self.store.seconds_per_row = 0.0002

    async def _evict(self) -> None:
        self.sometimes["candidate evicted between route and load"] += any(
            run.stage in {"queued", "restore"} for b in self.boards.values() for run in b.runs
        )
        self.store.evict_some()

    async def _clock_jump(self) -> None:
        self.sometimes["clock jump"] += 1
        self._wall_offset_ms += self.rng.choice([-3_600_000, 3_600_000])

    async def _sleepy_coordinator(self) -> None:
        """Its process or its machine was stopped; its clock went on."""
        if (coordinator := self._asked()) is not None:
            coordinator.clock_ahead_s += self.rng.choice([1.0, 5.0, 3_600.0])

    async def _full_disk(self) -> None:
        if (coordinator := self._asked()) is not None:
            self.sometimes["disk of the registry failed"] += 1
            coordinator.disk_fails = True
            await asyncio.sleep(self.rng.uniform(0.2, 2.0))
            coordinator.disk_fails = False

    async def _end_lease(self) -> None:
        """One of two coordinators is cut off from the registry: the other one takes its turns over while it lives."""
        if len(self.names) == 1 or (coordinator := self._asked()) is None:
            return
        self.sometimes["coordinator's lease ended while it lived"] += 1
        coordinator.disk_fails = self.rng.random() < 0.5  # else its writes arrive, and come too late
        self.ledger.living.pop(coordinator.registry.instance_id, None)
        await asyncio.sleep(self.rng.choice([0.5, 4.0, 8.0]))
        coordinator.disk_fails = False
        if coordinator.is_alive:
            await coordinator.registry.announce(coordinator.name)

    async def _crash_coordinator(self) -> None:
        if (coordinator := self._asked()) is None:
            return
        self.sometimes["coordinator restart in failover"] += coordinator.turns_between_nodes() > 0
        await coordinator.crash()
        await asyncio.sleep(self.rng.choice([0.2, 1.0, 5.0]))
        if self.coordinators[coordinator.name] is coordinator:
            await self._start_coordinator(coordinator.name)

    async def _drain(self) -> None:
        if (board := self._victim()) is None or board.is_frozen:
            return
        self.sometimes["drain with a zombie"] += any(b.is_frozen and b.runs for b in self.boards.values())
        await board.drain()
        await asyncio.sleep(0.5)
        if self.boards[board.node_id] is board:
            self._boot(board.node_id)

    async def _drop_everything(self) -> None:
        """All boards at once, as in a rack without power."""
        if self.rng.random() < 0.3:
            for board in self.boards.values():
                if not board.is_dead:
                    board.kill(kernel_lives=False)
            await asyncio.sleep(self.rng.uniform(0.5, 4.0))
            for name, board in list(self.boards.items()):
                if board.is_dead:
                    self._boot(name)


def run_seed(seed: int) -> Verdict:
    """One storm, from nothing to the verdict."""
    storm = Storm(seed)
    ended_s = 0.0

    async def main() -> None:
        nonlocal ended_s
        await storm.run()
        ended_s = asyncio.get_running_loop().time()

    with quiet():
        virtual_time.run(main())
    problems = tuple(check(storm.history, storm.ledger))
    return Verdict(seed, problems, storm.sometimes, storm.history.fingerprint(), ended_s, len(storm.history.tokens))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A storm is no news; what the coordinator logs as a bug reaches the verdict through the turn's error code."""
    loggers = [logging.getLogger(name) for name in ("kvferry", "stamina", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclasses.dataclass(slots=True)
class Tally:
    """Of many storms."""

    n_seeds: int = 0
    n_tokens: int = 0
    virtual_s: float = 0.0
    sometimes: Counter[str] = dataclasses.field(default_factory=Counter)
    failed: list[Verdict] = dataclasses.field(default_factory=list)

    @property
    def never(self) -> list[str]:
        """What no storm reached."""
        return [name for name in SOMETIMES if not self.sometimes[name]]


def run_seeds(seeds: Iterable[int], n_processes: int = 1) -> Tally:
    """All of them, on so many processes."""
    tally = Tally()
    if n_processes == 1:
        return count(tally, map(run_seed, seeds))
    with concurrent.futures.ProcessPoolExecutor(n_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return count(tally, pool.map(run_seed, seeds, chunksize=50))


def count(tally: Tally, verdicts: Iterable[Verdict]) -> Tally:
    for verdict in verdicts:
        tally.n_seeds += 1
        tally.n_tokens += verdict.n_tokens
        tally.virtual_s += verdict.virtual_s
        tally.sometimes.update({name: int(n > 0) for name, n in verdict.sometimes.items()})
        if verdict.problems:
            tally.failed.append(verdict)
    return tally
