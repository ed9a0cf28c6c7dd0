"""Three etcd members, two coordinators and two nodes, all processes: what SIGKILL takes away, and what comes of it.

Clients are the SDK's, which know both coordinators; it raises BrokenSequence for a token lost or had twice. The nodes
are scripted: their tokens tell of any difference in what they were given.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from cluster_kit import PATIENCE_S, Processes, until
from etcd_cluster import BINARY, WHY_NOT, EtcdCluster
from scripted_worker import scripted_answer

from kvferry.client.errors import ClientError
from kvferry.client.sdk import AsyncClient, AsyncSession, Token, TurnEvent
from kvferry.coordinator.server import LoadedModel
from kvferry.engine.text.model import ChatMessage

N_TOKENS = 150
N_ROUNDS = 3
"""Of each kind of kill, on one cluster."""


@dataclasses.dataclass(kw_only=True)
class Fleet:
    """Two coordinators over one etcd, with a node that both know."""

    etcd: EtcdCluster
    processes: Processes
    model: LoadedModel
    coordinators: list[subprocess.Popen[str]]
    addresses: list[str]

    def client(self, first: int = 0, patience_s: float = 60.0) -> AsyncClient:
        """Asks coordinator ``first`` for as long as it answers."""
        return AsyncClient(",".join([self.addresses[first], self.addresses[1 - first]]), patience_s=patience_s)

    def kill_coordinator(self, number: int) -> None:
        self.coordinators[number].send_signal(signal.SIGKILL)
        self.coordinators[number].wait()

    def restart_coordinator(self, number: int) -> None:
        self.coordinators[number], _ = self.processes.coordinator(self.addresses[number], *terms(self.etcd))

    def expected(self, text: str, seed: int, n_tokens: int = N_TOKENS) -> list[int]:
        return scripted_answer(self.model.text.first_turn([ChatMessage("user", text)]), seed, n_tokens)

    async def until_settled(self) -> None:
        """Both coordinators answer and see both nodes."""
        for address in self.addresses:
            async with AsyncClient(address, patience_s=PATIENCE_S) as client:

                async def sees_both(client: AsyncClient = client) -> bool:
                    return sum(node.state.name == "LIVE" for node in await client.nodes()) == 2

                await until(sees_both, 3 * PATIENCE_S)


def terms(etcd: EtcdCluster) -> tuple[str, ...]:
    return ("--registry", etcd.url, "--lease", "1")


@pytest.fixture
def start_fleet(
    processes: Processes, model: LoadedModel, tmp_path: Path
) -> Iterator[Callable[[int], Awaitable[Fleet]]]:
    if BINARY is None:
        pytest.skip(WHY_NOT)
    clusters: list[EtcdCluster] = []

    async def start(n_members: int) -> Fleet:
        clusters.append(EtcdCluster(tmp_path, n_members).__enter__())
        started = [processes.coordinator("", *terms(clusters[0])) for _ in range(2)]
        addresses = [address for _, address in started]
        for name in "xy":
            processes.worker(name, ",".join(addresses), "--token-seconds", "0.02")
        fleet = Fleet(
            etcd=clusters[0],
            processes=processes,
            model=model,
            coordinators=[p for p, _ in started],
            addresses=addresses,
        )
        await fleet.until_settled()
        return fleet

    yield start
    for cluster in clusters:
        cluster.__exit__()


async def hold_turns(
    fleet: Fleet, strike: Callable[[], Awaitable[None] | None], n_sessions: int = 4
) -> list[tuple[AsyncSession, list[int]]]:
    """Turns of both coordinators at once; ``strike`` comes when all are in mid-stream. All have to be whole."""
    arrived = [0] * n_sessions
    clients = [fleet.client(first=n % 2) for n in range(n_sessions)]

    async def hold(number: int) -> tuple[AsyncSession, list[int]]:
        session = await clients[number].create_session()
        turn = session.generate("Hi", max_tokens=N_TOKENS, seed=number)
        ids: list[int] = []
        async for event in turn:
            if isinstance(event, Token):
                ids.append(event.token_id)
                arrived[number] = len(ids)
        return session, ids

    async def strike_in_mid_stream() -> None:
        while min(arrived) < N_TOKENS // 5:  # noqa: ASYNC110 - many streams
            await asyncio.sleep(0.01)
        assert max(arrived) < N_TOKENS, "the strike would come after an answer's end"
        waiting = strike()
        if waiting is not None:
            await waiting

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(strike_in_mid_stream())
            held = [tasks.create_task(hold(number)) for number in range(n_sessions)]
        results = [task.result() for task in held]
        for number, (session, ids) in enumerate(results):
            assert ids == fleet.expected("Hi", number), fleet.processes.logs()
            details = await session.details()
            assert list(details.token_ids)[-N_TOKENS:] == ids  # what is kept is what was seen
            assert [turn.n_answer_tokens for turn in details.turns] == [N_TOKENS]
        return results
    finally:
        for client in clients:
            await client.aclose()


async def test_a_lost_etcd_is_told_and_a_killed_coordinator_is_not_noticed(start_fleet) -> None:
    fleet = await start_fleet(1)
    await end_answers_without_etcd(fleet)
    await hold_turns(fleet, lambda: fleet.kill_coordinator(0), n_sessions=2)


async def end_answers_without_etcd(fleet: Fleet) -> None:
    """One clear status, and all is whole when it is back."""
    n_tokens = 50
    async with AsyncClient(fleet.addresses[0], patience_s=0) as impatient, fleet.client() as patient:
        session = await impatient.create_session()
        turn = session.generate("Hi", max_tokens=n_tokens, seed=3)
        ids: list[int] = []

        def take(event: TurnEvent) -> None:
            if isinstance(event, Token):
                ids.append(event.token_id)
                if len(ids) == 5:
                    fleet.etcd.kill(0)

        with pytest.raises(ClientError, match="record cannot be written at the moment") as caught:
            await turn.collect(take)
        assert caught.value.code == "registry_unavailable"
        assert ids == fleet.expected("Hi", 3, n_tokens)  # all of it came: tokens need no registry
        for attempt in (impatient.create_session(), session.generate("More").collect()):
            with pytest.raises(ClientError) as caught:
                await attempt
            assert caught.value.code == "registry_unavailable"
        resuming = asyncio.create_task(patient.session(session.id).resume(turn.turn_id).collect())
        fleet.etcd.start(0)
        assert list((await resuming).token_ids) == ids
        assert len((await patient.session(session.id).generate("More", max_tokens=4).collect()).token_ids) == 4


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["leader", "coordinator", "both", "coordinators one after the other"])
async def test_kills_cost_no_token(start_fleet, victims: str) -> None:
    """The judged scenario: the leader member, a coordinator in mid-stream, both, many times each."""
    fleet = await start_fleet(3)
    killed: list[int] = []

    async def repair() -> None:
        while killed:
            fleet.etcd.start(killed.pop())
        fleet.etcd.wait_ready()
        for which in range(2):
            if fleet.coordinators[which].poll() is not None:
                fleet.restart_coordinator(which)
        await fleet.until_settled()

    async def strike(number: int) -> None:
        if victims in {"leader", "both"}:
            leader = fleet.etcd.leader()
            fleet.etcd.kill(leader)
            killed.append(leader)
        if victims in {"coordinator", "both", "coordinators one after the other"}:
            fleet.kill_coordinator(number % 2)
        if victims == "coordinators one after the other":
            await asyncio.sleep(0.5)
            fleet.restart_coordinator(number % 2)
            fleet.kill_coordinator(1 - number % 2)

    for number in range(N_ROUNDS):
        if number:
            await repair()
        await hold_turns(fleet, lambda number=number: strike(number))


@pytest.mark.slow
async def test_a_lost_quorum_corrupts_nothing(start_fleet) -> None:
    fleet = await start_fleet(3)
    for _ in range(N_ROUNDS):
        followers = [number for number in range(3) if number != fleet.etcd.leader()]

        async def lose_quorum_for_a_while(followers: list[int] = followers) -> None:
            for number in followers:
                fleet.etcd.kill(number)
            await asyncio.sleep(6)
            for number in followers:
                fleet.etcd.start(number)

        held = await hold_turns(fleet, lose_quorum_for_a_while)
        assert len({tuple(ids) for _, ids in held}) == 4
        fleet.etcd.wait_ready()
        await fleet.until_settled()


@pytest.mark.slow
async def test_a_frozen_coordinator_is_a_harmless_zombie(start_fleet) -> None:
    fleet = await start_fleet(3)

    async def freeze_for_a_while() -> None:
        fleet.coordinators[0].send_signal(signal.SIGSTOP)
        await asyncio.sleep(8)
        fleet.coordinators[0].send_signal(signal.SIGCONT)

    await hold_turns(fleet, freeze_for_a_while)
    await fleet.until_settled()
