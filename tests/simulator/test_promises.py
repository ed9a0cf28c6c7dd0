"""Promises of reliability.md that need many nodes or long times, on the virtual clock, with the real coordinator."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter

import pytest

from kvferry.coordinator.errors import IndexOutOfRange
from kvferry.coordinator.registry import Message, SessionRecord
from kvferry.coordinator.requests import SAMPLING_DEFAULTS, TurnRequest
from kvferry.coordinator.routing import Choice, RouteRequest, View, route
from kvferry.simulator import virtual_time
from kvferry.simulator.board import Speed
from kvferry.simulator.coordinator import NAMES, SimulatedCoordinator
from kvferry.simulator.fleet_model import BOARD_2B
from kvferry.simulator.plan import FleetPlan, Planner
from kvferry.simulator.storm import Storm
from kvferry.simulator.trace import SessionPlan, TurnPlan

# 24: affinity does not starve.


def test_a_prefix_that_all_share_does_not_make_one_node_do_all_the_work() -> None:
    """1,000 sessions with one common prefix on three nodes; at no decision does a node idle while another queues."""
    rng = random.Random(24)
    plans = [
        SessionPlan(start_s=rng.uniform(0, 6_000), system=0, system_tokens=1_500, turns=(TurnPlan(50, 40, 1.0),))
        for _ in range(1_000)
    ]
    idle_beside_a_queue = []

    def watched(view: View, request: RouteRequest) -> Choice:
        loads = [board.n_turns for board in planner.boards]
        waiting = [len(board.queue) for board in planner.boards]
        idle_beside_a_queue.append(min(loads) == 0 and max(waiting) > 2)
        return route(view, request)

    planner = Planner(FleetPlan(n_nodes=3, rates=BOARD_2B, spread=1.0), plans, watched)
    outcome = planner.run()
    turns = outcome.turns_by_node
    assert sum(turns.values()) == 1_000
    assert max(turns.values()) / min(turns.values()) <= 2, turns
    assert not any(idle_beside_a_queue)


# 19: busy is not dead.


class Calm(Storm):
    """A cluster without faults, but for those that a test makes."""

    def __init__(self, seed: int, n_boards: int) -> None:
        super().__init__(seed)
        self.names = NAMES[:1]
        self._n_boards = n_boards

    async def start(self) -> SimulatedCoordinator:
        await self._start_coordinator(NAMES[0])
        for number in range(self._n_boards):
            self._speeds[f"n{number}"] = Speed(400.0, 0.05)
            self._boot(f"n{number}")
        await asyncio.sleep(1.0)
        return self.coordinators[NAMES[0]]


def request(session_id: str, turn_id: str, max_tokens: int, text: str = "x" * 300) -> TurnRequest:
    return TurnRequest(
        session_id=session_id, turn_id=turn_id, sampling=SAMPLING_DEFAULTS, stop=(),
        messages=(Message("user", text),), max_tokens=max_tokens,
    )  # fmt: skip


async def new_session(coordinator: SimulatedCoordinator, session_id: str) -> None:
    await coordinator.registry.create_session(
        SessionRecord(
            session_id=session_id, model="simulated", tokenizer_digest="simulated", created_at_ms=0, updated_at_ms=0
        )
    )


def test_a_node_ten_times_slower_for_ten_minutes_loses_no_turn() -> None:
    calm = Calm(19, n_boards=3)

    async def main() -> tuple[int, int]:
        coordinator = await calm.start()
        for board in calm.boards.values():
            board.slowness = 10.0
        n_turns = 0
        loop = asyncio.get_running_loop()
        while loop.time() < 600.0:
            key = f"s{n_turns}"
            await new_session(coordinator, key)
            turn = await coordinator.turns.begin(request(key, "t", 27))
            kinds = Counter([e.WhichOneof("event") async for e in coordinator.turns.events(turn, 0)])
            assert kinds["node_lost"] == 0
            n_turns += 1
        return n_turns, coordinator.turns.n_failovers

    n_turns, n_failovers = virtual_time.run(main())
    assert n_turns > 20
    assert n_failovers == 0


# 18: detection is bounded. The real processes are tests/system's; here every moment of the heartbeat is tried.


@pytest.mark.parametrize("fault", ["kill", "freeze", "cut", "hang"])
def test_a_lost_node_is_left_within_its_bound(fault: str) -> None:
    bound_s = {"kill": 0.5, "freeze": 3.5, "cut": 3.5, "hang": 6.0 + 1.0}[
        fault
    ]  # the simulator's lease and stall limit

    async def left_after_s(moment_s: float) -> float:
        calm = Calm(int(moment_s * 1000), n_boards=2)
        coordinator = await calm.start()
        await new_session(coordinator, "s")
        turn = await coordinator.turns.begin(request("s", "t", 200))
        events = coordinator.turns.events(turn, 0)
        loop = asyncio.get_running_loop()
        broken_s = -1.0
        async for event in events:
            if event.HasField("token") and event.sequence == 2:
                await asyncio.sleep(moment_s)
                board = next(b for b in calm.boards.values() if b.runs)
                broken_s = loop.time()
                if fault == "kill":
                    board.kill(kernel_lives=True)
                elif fault == "freeze":
                    board.freeze()
                elif fault == "hang":
                    board.hang_engine()
                else:
                    calm.network.cut(board.node_id, "coordinator")
                    calm.network.cut("coordinator", board.node_id)
            if event.HasField("node_lost"):
                return loop.time() - broken_s
            if event.HasField("finished"):
                return 0.0  # the answer was shorter than the test
        raise AssertionError("the stream ended")

    for number in range(12):
        assert virtual_time.run(left_after_s(number * 0.04)) <= bound_s


# 22: a client may come back and read from any index.


def test_any_index_gives_the_exact_rest_or_one_clear_error() -> None:
    calm = Calm(22, n_boards=2)
    rng = random.Random(22)

    async def main() -> int:
        coordinator = await calm.start()
        answers: dict[str, list[int]] = {}
        for number in range(20):
            await new_session(coordinator, f"s{number}")
            turn = await coordinator.turns.begin(request(f"s{number}", "t", 40, text=f"question {number}"))
            answers[f"s{number}"] = [
                e.token.token_id async for e in coordinator.turns.events(turn, 0) if e.HasField("token")
            ]
        n_refused = 0
        for _ in range(1_000):
            session_id = rng.choice(sorted(answers))
            answer = answers[session_id]
            from_index = rng.choice([0, len(answer), len(answer) + 1, rng.randrange(60)])
            try:
                events = [e async for e in coordinator.turns.events((session_id, "t"), from_index)]
            except IndexOutOfRange:
                assert from_index > len(answer)
                n_refused += 1
                continue
            assert from_index <= len(answer)
            assert [e.token.token_id for e in events if e.HasField("token")] == answer[from_index:]
            assert events[-1].finished.n_answer_tokens == len(answer)
        return n_refused

    assert virtual_time.run(main()) > 100


# 26: cancelling frees the slot.


def test_a_cancelled_turn_frees_its_slot_within_a_step() -> None:
    calm = Calm(26, n_boards=1)
    rng = random.Random(26)

    async def main() -> None:
        coordinator = await calm.start()
        (board,) = calm.boards.values()
        loop = asyncio.get_running_loop()
        for number in range(500):
            await new_session(coordinator, f"s{number}")
            turn = await coordinator.turns.begin(request(f"s{number}", "t", 200))
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            await coordinator.turns.cancel(*turn)
            cancelled_s = loop.time()
            while board.runs:  # noqa: ASYNC110 - the board knows nothing of the test
                await asyncio.sleep(0.005)
            assert loop.time() - cancelled_s <= 0.05 + 0.1
        assert coordinator.turns.n_open == 0

    virtual_time.run(main())


# 17: zombies are harmless. The storms freeze boards; this is a coordinator that should be gone.


def test_a_second_coordinator_with_an_old_log_gets_no_token_from_anybody() -> None:
    calm = Calm(17, n_boards=2)

    async def main() -> tuple[int, int]:
        first = await calm.start()
        old_log = copy.deepcopy(calm.ledger)
        await first.crash()
        await calm._start_coordinator(NAMES[0])  # the second life of the right one
        await calm.coordinators[NAMES[0]].crash()
        await calm._start_coordinator(NAMES[0])  # and its third
        await asyncio.sleep(4.0)  # the boards have heard of it
        zombie = SimulatedCoordinator(
            NAMES[0], old_log, calm.network, calm.store, calm.rng, calm._board_at, lambda: 0, lambda: False,
            is_shared=False,
        )  # fmt: skip
        await zombie.start()
        await asyncio.sleep(1.2)  # its time of grace
        for board in calm.boards.values():  # as if somebody had told them its address
            await zombie.answer("Register", board._registration())
        await new_session(zombie, "stolen")
        turn = await zombie.turns.begin(request("stolen", "t", 20))
        await asyncio.sleep(0.8)  # it believes in its boards for a lease
        live = zombie.turns.live_turn(*turn)
        assert live is not None
        assert live.placements
        n_tokens = len(live.answer_ids)
        await zombie.crash()
        await calm.coordinators[NAMES[0]].crash()
        return n_tokens, calm.sometimes["generation refused"]

    n_tokens, n_refused = virtual_time.run(main())
    assert n_tokens == 0
    assert n_refused >= 1
