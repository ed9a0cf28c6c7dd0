"""Ten times more than the coordinator takes: the rest is told so at once, with when to come back (promise 25)."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
import psutil
import pytest
from cluster_kit import Client, Processes, all_of, code_of, ids_of, read_while_it_lasts, retry_after_ms
from scripted_worker import Script

pytestmark = pytest.mark.alone  # its times are promises


async def test_ten_times_too_many_turns_are_refused_at_once_and_the_others_are_served(new_cluster) -> None:
    cluster = await new_cluster(max_open_turns=8)
    await cluster.worker("a", Script(token_seconds=0.05))
    client = cluster.client()
    await client.until_nodes(1)
    sessions = [await client.new_session() for _ in range(80)]
    order: list[str] = []

    async def ask(session: str) -> str:
        events, error = await read_while_it_lasts(client.generate(session, max_tokens=30))
        if error is None:
            assert len(ids_of(events)) == 30
            order.append("served")
            return "served"
        assert (error.code(), code_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full")
        assert retry_after_ms(error) > 0
        assert events == []
        order.append("refused")
        return "refused"

    before = psutil.Process().memory_info().rss
    outcomes = await asyncio.gather(*map(ask, sessions))
    assert outcomes.count("served") == 8
    assert order[:72] == ["refused"] * 72  # at once: before the first answer was over
    assert psutil.Process().memory_info().rss - before < 50 * 2**20
    # what was refused left nothing behind: the same sessions are served when there is room
    refused = [s for s, outcome in zip(sessions, outcomes, strict=True) if outcome == "refused"]
    assert len(ids_of(await all_of(client.generate(refused[0], max_tokens=3)))) == 3


async def test_two_turns_of_the_limit_asked_for_in_the_same_moment_are_not_both_let_in(new_cluster) -> None:
    cluster = await new_cluster(max_open_turns=1)
    await cluster.worker("a", Script(token_seconds=0.05))
    client = cluster.client()
    await client.until_nodes(1)
    sessions = [await client.new_session() for _ in range(6)]
    found = await asyncio.gather(*(read_while_it_lasts(client.generate(s, max_tokens=20)) for s in sessions))
    assert sum(error is None for _, error in found) == 1


def p99(spans: list[float]) -> float:
    return sorted(spans)[int(0.99 * (len(spans) - 1))]


@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.slow)])
async def test_25_a_crowd_that_keeps_coming_slows_nobody_who_was_let_in(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Eight may be answered at once and eighty ask, over and over; the same eight alone are the measure."""
    monkeypatch.setenv("KVFERRY_COORDINATOR_MAX_OPEN_TURNS", "8")
    coordinator, address = processes.coordinator("127.0.0.1:0", "--log-level", "error")
    processes.worker("a", address, "--token-seconds", "0.03")
    client = Client(address)
    refused_s: list[float] = []
    lags_s: list[float] = []

    async def keep_asking(session: str, served_s: list[float], ends_at: float) -> None:
        while time.monotonic() < ends_at:
            began = time.monotonic()
            events, error = await read_while_it_lasts(client.generate(session, "Hi", max_tokens=20))
            took = time.monotonic() - began
            if error is None:
                assert len(ids_of(events)) == 20
                served_s.append(took)
            else:
                assert (error.code(), code_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full")
                assert retry_after_ms(error) > 0
                refused_s.append(took)
            await asyncio.sleep(0.5)

    async def late() -> None:
        """How late this process's own loop wakes, whose clients and machine are not the coordinator's fault."""
        while True:
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            lags_s.append(time.monotonic() - due)

    async def short_calls(n: int) -> list[float]:
        """What the shortest call takes here when so many come in the same moment."""

        async def one() -> float:
            began = time.monotonic()
            await client.status()
            return time.monotonic() - began

        return [took for _ in range(5) for took in await asyncio.gather(*(one() for _ in range(n)))]

    async def crowd(n: int) -> list[float]:
        served_s: list[float] = []
        sessions = [await client.new_session() for _ in range(n)]
        ends_at = time.monotonic() + seconds
        await asyncio.gather(*(keep_asking(session, served_s, ends_at) for session in sessions))
        return served_s

    try:
        await client.until_nodes(1)
        alone = await crowd(6)
        assert not refused_s
        short_s = await short_calls(80)
        rss = psutil.Process(coordinator.pid).memory_info().rss
        watching = asyncio.create_task(late())
        beside = await crowd(80)
        watching.cancel()
        grown = psutil.Process(coordinator.pid).memory_info().rss - rss
    finally:
        await client.channel.close()
    figures = (
        f"{len(refused_s)} refused, p99 {p99(refused_s) * 1e3:.0f} ms; {len(beside)} served, p99 {p99(beside):.2f} s, "
        f"{p99(alone):.2f} s for those who were alone; {grown / 2**20:.1f} MiB; "
        f"this process itself was {p99(lags_s) * 1e3:.0f} ms late, and 80 short calls took {p99(short_s) * 1e3:.0f} ms"
    )
    print(figures)
    assert len(refused_s) > 5 * len(beside), figures
    assert p99(refused_s) <= 0.1 + 4 * p99(lags_s) + p99(short_s), figures
    assert p99(beside) <= 1.2 * p99(alone) + 20 * p99(lags_s), figures  # one for each token
    assert grown <= 50 * 2**20, figures
