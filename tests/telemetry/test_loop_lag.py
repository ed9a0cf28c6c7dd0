from __future__ import annotations

import asyncio
import contextlib
import time

from kvferry.telemetry.loop_lag import N_SAMPLES, LagSummary, LoopLag


def test_nothing_measured_is_no_lag() -> None:
    assert LoopLag(time.monotonic).summary() == LagSummary()


def test_the_largest_and_the_usual_lag_are_told_apart() -> None:
    lag = LoopLag(time.monotonic)
    for i in range(100):
        lag.add(0.5 if i == 17 else 0.001)
    lag.add(-0.1)  # a loop is never early
    assert lag.summary() == LagSummary(0.001, 0.001, 0.5, 101)


def test_only_the_latest_half_minute_counts() -> None:
    lag = LoopLag(time.monotonic)
    lag.add(9.0)
    for _ in range(N_SAMPLES):
        lag.add(0.002)
    assert lag.summary() == LagSummary(0.002, 0.002, 0.002, N_SAMPLES)


async def test_a_blocked_loop_is_seen() -> None:
    lag = LoopLag(time.monotonic)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0.03)
    time.sleep(0.2)  # noqa: ASYNC251 - that is the point
    await asyncio.sleep(0.03)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert lag.summary().largest >= 0.17
