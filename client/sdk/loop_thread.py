"""An event loop in a thread of its own, for those who wait for coroutines without await."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Final, Generic, TypeVar

from kvferry.client.errors import ClientError

T = TypeVar("T")

JOIN_S: Final = 10.0
"""Closing a channel takes milliseconds; a loop that is still busy after this is abandoned with its daemon thread."""


class _Call(Generic[T]):
    """A coroutine that runs in the loop of another thread. An interrupt may come at any instruction of ours, also
    between handing it over and knowing that it was."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.result: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._ended = threading.Event()
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """In the loop."""
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._tell)

    def cancel(self) -> None:
        """In the loop."""
        if self._task is None:  # it was never handed over
            self._coroutine.close()
            self._ended.set()
        else:
            self._task.cancel()

    def refuse(self, error: Exception) -> None:
        """In place of `begin`."""
        self._coroutine.close()
        self.result.set_exception(error)

    def wait_ended(self) -> None:
        """What was cancelled may have to be cleaned up before anything else is asked of the same stream."""
        self._ended.wait(JOIN_S)

    def _tell(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.result.cancel()
            self.result.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())
        self._ended.set()


class LoopThread:
    """An event loop that other threads hand coroutines to."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._handing_over = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvferry-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for the coroutine; an interrupt of the waiting thread cancels it. Raises ClientError after `close`."""
        call = _Call(coroutine)
        try:
            self._hand_over(call)
            return call.result.result()
        except BaseException:
            if not call.result.done():
                self._loop.call_soon_threadsafe(call.cancel)
                call.wait_ended()
            raise

    def _hand_over(self, call: _Call[Any]) -> None:
        with self._handing_over:  # a loop that ends takes what comes after its last round, and never looks at it
            if self._is_closed:
                call.refuse(ClientError("the client is closed"))
            else:
                self._loop.call_soon_threadsafe(call.begin)

    @property
    def is_closed(self) -> bool:
        """For good; what was handed over before may still be ending."""
        return self._is_closed

    def close(self) -> None:
        """Ends what runs in it, also for threads that wait for it."""
        with self._handing_over:
            if self._is_closed:
                return
            self._is_closed = True
        for last in (_end_all_tasks(), self._loop.shutdown_asyncgens()):
            asyncio.run_coroutine_threadsafe(last, self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _end_all_tasks() -> None:
    """What a closed call leaves to be done is done: a task that the loop's end cuts off complains on standard error."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=JOIN_S)
