"""A simulated program: asks, reads, loses its connection, comes back and goes on from where it was."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvferry.coordinator.errors import CoordinatorError, SessionExists, TurnElsewhere, UnknownSession
from kvferry.coordinator.registry import FinishReason, Message, SessionRecord
from kvferry.coordinator.requests import SAMPLING_DEFAULTS, TurnRequest
from kvferry.proto.v1 import chat_pb2, common_pb2
from kvferry.simulator.coordinator import SimulatedCoordinator
from kvferry.simulator.history import History, Seen

RETRY_S: Final = 0.25
WORDS: Final = "a shared system prompt that every session of this cluster begins with, long enough to be worth a read. "


class SimulatedClient:
    """One session of a few turns."""

    def __init__(
        self, name: str, rng: random.Random, history: History, sometimes: Counter[str],
        coordinator: Callable[[str], SimulatedCoordinator | None],
    ) -> None:  # fmt: skip
        self._name, self._rng, self._history, self._sometimes = name, rng, history, sometimes
        self._coordinator = coordinator

    async def run(self, n_turns: int, *, begins_anew: bool = False) -> None:
        """``begins_anew``: then it deletes its session and makes another one under the same name."""
        await self._create()
        for number in range(n_turns):
            await self._take_turn(number)
        if begins_anew:
            await self._delete()
            await self._create()
            await self._take_turn(n_turns)
            self._sometimes["session made anew under its name"] += 1

    async def _take_turn(self, number: int) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 4.0))
        request = self._request(number)
        key = await self._begin(request)
        self._history.begun.append(key)
        await self._read(key, request)
        if self._rng.random() < 0.2:  # and once more, from any index, when it is over
            await self._read(key, request, self._rng.randrange(request.max_tokens))

    def _request(self, number: int) -> TurnRequest:
        sampling = common_pb2.SamplingSettings()
        sampling.CopyFrom(SAMPLING_DEFAULTS)
        sampling.seed = self._rng.getrandbits(16)
        system = (Message("system", WORDS * self._rng.choice([1, 4])),) if number == 0 else ()
        return TurnRequest(
            session_id=self._name, turn_id=f"t{number}", sampling=sampling, stop=(),
            messages=(*system, Message("user", "x" * self._rng.choice([3, 40, 400]))),
            max_tokens=self._rng.randrange(1, 28),
        )  # fmt: skip

    async def _create(self) -> None:
        while True:
            with contextlib.suppress(CoordinatorError):
                record = SessionRecord(
                    session_id=self._name, model="simulated", tokenizer_digest="simulated", created_at_ms=0,
                    updated_at_ms=0,
                )  # fmt: skip
                with contextlib.suppress(SessionExists):  # asked before, and the answer was lost
                    await (await self._connected()).registry.create_session(record)
                return
            await asyncio.sleep(RETRY_S)

    async def _delete(self) -> None:
        while True:
            try:
                await (await self._connected()).turns.delete_session(self._name)
            except UnknownSession:  # asked before, and the answer was lost
                break
            except CoordinatorError:
                await asyncio.sleep(RETRY_S)
            else:
                break
        self._history.forget(self._name)

    async def _begin(self, request: TurnRequest) -> tuple[str, str]:
        """Asks again with the same id until it is told that the turn is durable."""
        while True:
            try:
                return await (await self._connected()).turns.begin(request)
            except CoordinatorError:
                await asyncio.sleep(RETRY_S)
            except Exception as e:
                self._history.violations.append(f"{self._name}: begin met a bug, {e!r}")
                raise

    async def _read(self, key: tuple[str, str], request: TurnRequest, from_index: int | None = None) -> None:
        next_index = from_index or 0
        n_lost = 0
        hurries = self._rng.random() < 0.1  # cancels in the middle
        asks = ""  # whoever is there
        while True:
            reader = len(self._history.began_at)
            self._history.began_at[reader] = next_index
            leaves_after = self._rng.choice([10**6, 10**6, self._rng.randrange(1, 20)])
            coordinator = await self._connected(asks)
            asks = ""
            try:
                async with contextlib.aclosing(coordinator.turns.events(key, next_index)) as events:
                    async for event in events:
                        if event.HasField("token"):
                            self._see(reader, event)
                            next_index = event.sequence + 1
                        n_lost += self._note_loss(event, request, n_lost)
                        if event.HasField("finished"):
                            self._finish(key, event)
                            return
                        leaves_after -= 1
                        if leaves_after <= 0:
                            break
                        if hurries and next_index > request.max_tokens // 2:
                            hurries = False
                            await coordinator.turns.cancel(*key)
            except TurnElsewhere as e:  # where the service would read it for us
                self._sometimes["read through another coordinator"] += 1
                asks = e.address
                await asyncio.sleep(RETRY_S)
            except CoordinatorError as e:
                if e.code == "index_out_of_range" and from_index:
                    return  # the answer was shorter
                await asyncio.sleep(RETRY_S)
            except Exception as e:
                self._history.violations.append(f"{self._name}: a reader met a bug, {e!r}")
                raise

    async def _connected(self, name: str = "") -> SimulatedCoordinator:
        while True:  # as a program does that tries again
            if (coordinator := self._coordinator(name)) is not None:
                return coordinator
            await asyncio.sleep(RETRY_S)
            name = ""

    def _see(self, reader: int, event: chat_pb2.TurnEvent) -> None:
        self._history.tokens.append(
            Seen(
                reader,
                event.session_id,
                event.turn_id,
                event.sequence,
                event.token.token_id,
                event.epoch,
                asyncio.get_running_loop().time(),
            )
        )

    def _finish(self, key: tuple[str, str], event: chat_pb2.TurnEvent) -> None:
        told = FinishReason(event.finished.reason), event.finished.n_answer_tokens
        if self._history.finished.setdefault(key, told) != told:
            self._history.violations.append(f"{key}: two readers were told two ends, {told}")
        self._sometimes["turn ended with an error"] += told[0] is FinishReason.ERROR
        self._sometimes["turn cancelled"] += told[0] is FinishReason.CANCELLED

    def _note_loss(self, event: chat_pb2.TurnEvent, request: TurnRequest, n_lost: int) -> int:
        if not event.HasField("node_lost") or event.node_lost.cause == "refused":
            return 0
        if event.sequence == 0:
            self._sometimes["failover in prefill"] += 1
        if event.sequence == 1:
            self._sometimes["failover at the first token"] += 1
        if event.sequence == request.max_tokens - 1:
            self._sometimes["failover at the last token"] += 1
        if n_lost == 1:
            self._sometimes["double failover"] += 1
        return 1
