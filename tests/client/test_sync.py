"""The client without await: its coroutines run in the loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client.errors import ClientError
from kvferry.client.sdk import Client
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


def test_who_asks_while_another_thread_closes_the_client_does_not_wait_for_ever(monkeypatch):
    thread = LoopThread()
    hand_over, refusals = thread._loop.call_soon_threadsafe, []

    def ask() -> None:
        with pytest.raises(ClientError) as caught:
            thread.run(n_others())
        refusals.append(str(caught.value))

    def handed_over(callback: Callable[..., Any], *arguments: Any, **how: Any) -> None:
        hand_over(callback, *arguments, **how)
        if callback == thread._loop.stop:  # it has ended, and takes what comes without looking at it
            thread._thread.join()
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(10)

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", handed_over)
    thread.close()
    assert refusals == ["the client is closed"]


def test_a_closed_client_says_so_and_its_streams_are_closed():
    client = Client("127.0.0.1:1", patience_s=0)
    session = client.session("s")
    turn = session.resume()
    client.close()
    client.close()
    turn.close()
    for ask in (client.models, session.details, lambda: next(turn)):
        with pytest.raises(ClientError, match="the client is closed"):
            ask()
