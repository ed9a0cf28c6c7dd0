"""The client without await: its coroutines run in the loop of another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client.sdk.loop_thread import LoopThread


async def sleep_long() -> None:
    await asyncio.sleep(60)


async def n_others() -> int:
    return len(asyncio.all_tasks()) - 1


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_an_interrupt_at_any_instruction_leaves_nothing_running(monkeypatch, is_handed_over):
    """Ctrl-C between handing a coroutine over and waiting for it: it must not run on beside what is asked next."""
    thread = LoopThread()
    hand_over = thread._loop.call_soon_threadsafe
    interrupts = [KeyboardInterrupt]

    def interrupted(callback: Callable[..., Any], *arguments: Any) -> None:
        if is_handed_over or not interrupts:
            hand_over(callback, *arguments)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(sleep_long())
    assert thread.run(n_others()) == 0
    thread.close()
