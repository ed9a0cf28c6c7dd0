"""A simulated node: the node's own fence, and an engine, a memory and a store that take as long as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np

from kvferry.node.errors import Draining, LeaseLost, NodeError, QueueFull, StaleCoordinator, StaleEpoch
from kvferry.node.fencing import Fence
from kvferry.proto.v1 import common_pb2, fleet_pb2, worker_pb2
from kvferry.simulator.network import Network
from kvferry.simulator.store import SimulatedStore
from kvferry.simulator.streams import Stream
from kvferry.simulator.text import END, TokenStream
from kvferry.store.lcp_index import common_prefix

MAX_RUNNING: Final = 2
MAX_QUEUED: Final = 4
RESTORE_DEADLINE_S: Final = 2.0
RESTORE_MIN_TOKENS: Final = 16
CALL_TIMEOUT_S: Final = 1.0
RETRY_S: Final = 0.3
FINGERPRINT: Final = "f" * 32
CONTEXT_LENGTH: Final = 8_192


class Unreachable(Exception):
    """A call got no answer."""


Call = Callable[[str, str, str, object], Awaitable[object]]
"""(node id, coordinator, method, request) → the coordinator's answer. Raises Unreachable."""


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """Of one board."""

    prefill_tokens_per_s: float
    token_s: float


@dataclasses.dataclass(slots=True, eq=False)
class Run:
    request: worker_pb2.RunTurnRequest
    stream: Stream
    token_ids: list[int]
    stage: str = "queued"
    task: asyncio.Task[None] | None = None


class Board:
    """One boot of one node."""

    def __init__(
        self, node_id: str, boot: int, speed: Speed, network: Network, store: SimulatedStore, call: Call,
        coordinators: Sequence[str],
    ) -> None:  # fmt: skip
        self.node_id, self.boot_id = node_id, f"{node_id}-{boot}"
        self.address = f"{node_id}:{boot}"
        self.is_dead = False
        self.is_saving = False
        self.slowness = 1.0
        self.resident: dict[str, list[int]] = {}
        self.runs: list[Run] = []
        self._speed, self._network, self._store, self._call = speed, network, store, call
        self._sometimes = network.sometimes
        self._fence = Fence()
        self._awake = asyncio.Event()
        self._awake.set()
        self._engine_steps = asyncio.Event()
        self._engine_steps.set()
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._published: list[worker_pb2.SnapshotInfo] = []
        self._hung_since_s: float | None = None
        self._coordinators = coordinators
        self._tasks = [self._spawn(self._watch_leases()), *(self._spawn(self._membership(n)) for n in coordinators)]

    # What happens to a board.

    def kill(self, *, kernel_lives: bool) -> None:
        """SIGKILL closes its connections; a power cut says nothing to anybody."""
        if self.is_saving:
            self._sometimes["node lost during a save"] += 1
        self.is_dead = True
        for task in [*self._tasks, *(run.task for run in self.runs if run.task)]:
            task.cancel()
        if kernel_lives:
            for run in self.runs:
                run.stream.break_off("the process is gone")

    def freeze(self) -> None:
        self._awake.clear()

    def thaw(self) -> None:
        self._awake.set()

    @property
    def is_frozen(self) -> bool:
        return not self._awake.is_set()

    def hang_engine(self) -> None:
        """Heartbeats go on; nothing is computed."""
        self._engine_steps.clear()
        self._hung_since_s = self._now()

    def unhang_engine(self) -> None:
        self._engine_steps.set()
        self._hung_since_s = None

    async def drain(self) -> None:
        """In order: no new turns, running ones end between two tokens, the memory is saved, good-bye."""
        self._fence.draining = True
        for run in list(self.runs):
            self._end(run, Draining("this node is being drained"))
        await self._work(0.05)
        for token_ids in list(self.resident.values()):
            await self._save(token_ids)
        good_bye = fleet_pb2.DeregisterRequest(node_id=self.node_id, boot_id=self.boot_id)
        for coordinator in self._coordinators:
            with contextlib.suppress(Unreachable):
                await self._call(self.node_id, coordinator, "Deregister", good_bye)
        self.kill(kernel_lives=True)

    # What a coordinator asks.

    def accept(self, request: worker_pb2.RunTurnRequest, stream: Stream) -> None:
        """RunTurn arrives; a frozen board finds it when it thaws."""
        if not self.is_dead:
            self._tasks.append(self._spawn(self._admit(request, stream)))

    def hang_up(self, stream: Stream) -> None:
        """The coordinator cancelled the call; on one connection that cannot overtake the call itself."""
        stream.is_hung_up = True
        for run in [r for r in self.runs if r.stream is stream]:
            self._end(run, None)

    def drop(self, session_id: str) -> None:
        self.resident.pop(session_id, None)

    # How it does it.

    async def _admit(self, request: worker_pb2.RunTurnRequest, stream: Stream) -> None:
        await self._work(0.0)
        if stream.is_hung_up:
            return
        try:
            self._fence.admit(
                request.session_id, request.epoch, request.coordinator_generation, self._now(),
                request.coordinator_instance,
            )  # fmt: skip
            if len(self.runs) >= MAX_RUNNING + MAX_QUEUED:
                raise QueueFull("the queue is full")
        except NodeError as e:
            self._sometimes["epoch refused"] += isinstance(e, StaleEpoch)
            self._sometimes["generation refused"] += isinstance(e, StaleCoordinator)
            stream.fail(e.code, str(e))
            return
        for run in [r for r in self.runs if r.request.session_id == request.session_id]:
            self._end(run, StaleEpoch(f"session {request.session_id} went on at epoch {request.epoch}"))
        run = Run(request, stream, list(request.token_ids))
        self.runs.append(run)
        run.task = self._spawn(self._run(run))

    async def _run(self, run: Run) -> None:
        """The whole life of a turn on a board."""
        async with self._slots:
            await self._prefill(run)
            await self._decode(run)
        self._end(run, None)
        await self._save(run.token_ids[:-1])

    async def _prefill(self, run: Run) -> None:
        ids = np.array(run.token_ids, dtype=np.int32)
        n_most = len(ids) - 1
        n_resident = min(
            max((common_prefix(np.array(r, dtype=np.int32), ids) for r in self.resident.values()), default=0), n_most
        )
        arrived_s = self._now()
        run.stage = "restore"
        n_restored = await self._restore(ids, n_resident) if not run.request.recompute else 0
        restored_s = self._now()
        run.stage = "prefill"
        n_computed = len(ids) - max(n_resident, n_restored)
        await self._work(n_computed / self._speed.prefill_tokens_per_s)
        self.resident[run.request.session_id] = run.token_ids[:n_most]
        run.stage = "decode"
        prefix = common_pb2.PrefixReport(
            n_tokens=len(ids), n_resident=0 if n_restored else n_resident, n_restored=n_restored, n_computed=n_computed,
            restore_seconds=restored_s - arrived_s, prefill_seconds=self._now() - restored_s,
        )  # fmt: skip
        run.stream.send(worker_pb2.RunTurnResponse(prefix=prefix))

    async def _restore(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]], n_resident: int) -> int:
        n_found = self._store.find(ids)
        if n_found < n_resident + RESTORE_MIN_TOKENS:
            return 0
        seconds = 0.01 + n_found * self._store.seconds_per_row
        if seconds > RESTORE_DEADLINE_S:
            self._sometimes["restore abandoned as too slow"] += 1
            await self._work(RESTORE_DEADLINE_S)
            return 0
        await self._work(seconds)
        return n_found

    async def _decode(self, run: Run) -> None:
        request = run.request
        tokens = TokenStream(run.token_ids, request.sampling.seed)
        while True:
            index = len(run.token_ids) - request.n_prompt_tokens
            token_id = tokens.next()
            run.token_ids.append(token_id)
            self.resident[request.session_id] = run.token_ids[:-1]
            generated = common_pb2.GeneratedToken(index=index, token_id=token_id)
            run.stream.send(worker_pb2.RunTurnResponse(tokens=worker_pb2.GeneratedTokens(tokens=[generated])))
            if token_id == END or index + 1 >= request.max_tokens:
                reason = common_pb2.FINISH_REASON_END if token_id == END else common_pb2.FINISH_REASON_LENGTH
                run.stream.send(worker_pb2.RunTurnResponse(finished=worker_pb2.RunFinished(reason=reason)))
                run.stream.send(None)
                return
            await self._work(self._speed.token_s)

    async def _save(self, token_ids: list[int]) -> None:
        if len(token_ids) < RESTORE_MIN_TOKENS:
            return
        self.is_saving = True
        try:
            await self._work(0.02 + len(token_ids) * self._store.seconds_per_row)
            name = self._store.publish(token_ids)
        finally:
            self.is_saving = False
        self._published.append(worker_pb2.SnapshotInfo(name=name, fingerprint=FINGERPRINT, n_tokens=len(token_ids)))

    def _end(self, run: Run, error: NodeError | None) -> None:
        if run in self.runs:
            self.runs.remove(run)
        if error is not None:
            run.stream.fail(error.code, str(error))
        if run.task is not None and run.task is not asyncio.current_task():
            run.task.cancel()

    async def _work(self, seconds: float) -> None:
        """Takes longer on a slow board, and stands still on a frozen one or one whose engine hangs."""
        await asyncio.sleep(seconds * self.slowness)
        await self._awake.wait()
        if seconds:
            await self._engine_steps.wait()

    # Membership.

    async def _membership(self, coordinator: str) -> None:
        """In one coordinator's fleet, as ``node.membership`` does it."""
        instance, lease_s, pause_s, n_told = "", 0.0, 0.0, 0
        is_member = False
        while True:
            await asyncio.sleep(pause_s)
            await self._awake.wait()
            asked_s = self._now()
            try:
                if is_member:
                    n_published = len(self._published)
                    answer = await self._beat(coordinator, n_told)
                    is_member = not answer.register_again
                    n_told = n_published
                    pause_s = lease_s / 6
                else:
                    terms = await self._register(coordinator)
                    if terms.coordinator_instance != instance:
                        self._fence.forget_lease(instance)
                        instance, n_told = terms.coordinator_instance, 0
                    is_member, lease_s, pause_s = True, terms.lease_seconds, terms.heartbeat_seconds
            except (Unreachable, StaleCoordinator):
                pause_s = RETRY_S
                continue
            await self._awake.wait()  # a board that froze while it waited reads the answer when it thaws
            self._fence.renew_lease(asked_s, lease_s, instance)

    async def _register(self, coordinator: str) -> fleet_pb2.RegisterResponse:
        answer = await self._call(self.node_id, coordinator, "Register", self._registration())
        assert isinstance(answer, fleet_pb2.RegisterResponse)  # noqa: S101
        self._fence.see_generation(answer.coordinator_generation)
        return answer

    async def _beat(self, coordinator: str, n_told: int) -> fleet_pb2.HeartbeatResponse:
        answer = await self._call(self.node_id, coordinator, "Heartbeat", fleet_pb2.HeartbeatRequest(
            node_id=self.node_id, boot_id=self.boot_id, load=self._load(), resident=self._residents(),
            published=self._published[n_told:], draining=self._fence.draining,
        ))  # fmt: skip
        assert isinstance(answer, fleet_pb2.HeartbeatResponse)  # noqa: S101
        self._fence.see_generation(answer.coordinator_generation)
        return answer

    def _registration(self) -> fleet_pb2.RegisterRequest:
        return fleet_pb2.RegisterRequest(
            node_id=self.node_id, boot_id=self.boot_id, address=self.address, model="simulated",
            fingerprint=FINGERPRINT, tokenizer_digest="simulated", context_length=CONTEXT_LENGTH,
            geometry=common_pb2.KvGeometry(n_layers=1, n_kv_heads=1, head_dim=64, block_size=32),
            max_running=MAX_RUNNING, load=self._load(), resident=self._residents(),
        )  # fmt: skip

    def _load(self) -> worker_pb2.NodeLoad:
        n_running = min(len(self.runs), MAX_RUNNING)
        stalled_s = self._now() - self._hung_since_s if self._hung_since_s is not None and self.runs else 0.0
        return worker_pb2.NodeLoad(
            n_running=n_running, n_queued=len(self.runs) - n_running, store_ok=True, stalled_seconds=stalled_s
        )

    def _residents(self) -> list[worker_pb2.ResidentSession]:
        return [worker_pb2.ResidentSession(session_id=s, n_tokens=len(ids)) for s, ids in self.resident.items()]

    async def _watch_leases(self) -> None:
        while True:
            await self._awake.wait()
            now_s = self._now()
            for run in list(self.runs):
                if self._fence.lease_lost(now_s, run.request.coordinator_instance):
                    self._end(run, LeaseLost("this node has not heard its coordinator for a whole lease"))
            ends_s = self._fence.next_lease_end(now_s)
            await asyncio.sleep(0.5 if ends_s is None else ends_s - now_s)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
