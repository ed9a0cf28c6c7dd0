"""The one thread that owns the registry's SQLite connection, and how calls get to it and back.

Calls run one after the other, in order. Those that wait while it commits are committed together next time: on an eMMC a
commit takes milliseconds, and a hundred turns that begin at once would wait for a hundred of them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from kvferry.coordinator.errors import CoordinatorError, RegistryUnavailable
from kvferry.coordinator.registry_trouble import what_to_do

T = TypeVar("T")

MAX_TOGETHER: Final = 64
"""Calls in one transaction; nobody waits for more than those."""

PRAGMAS: Final = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON")
"""A commit has reached the disk when it returns."""


@dataclasses.dataclass(slots=True)
class _Call:
    """Its result or its error, once it is known to be on the disk."""

    function: Callable[[sqlite3.Connection], Any]
    writes: bool
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def answer(self) -> None:
        """In the loop; whoever asked may be gone."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class SqliteThread:
    """All methods from one event loop, which never touches SQLite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="registry")
        self._waiting: deque[_Call] = deque()
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    async def open(self, prepare: Callable[[sqlite3.Connection], T]) -> T:
        """Connect, and do what has to be done before anything else. Raises what ``prepare`` and SQLite raise."""

        def opened() -> T:
            self._connection = sqlite3.connect(self._path, isolation_level="IMMEDIATE")
            self._connection.row_factory = sqlite3.Row
            for pragma in PRAGMAS:
                self._connection.execute(f"PRAGMA {pragma}")
            return prepare(self._connection)

        return await asyncio.wrap_future(self._executor.submit(opened))

    async def close(self) -> None:
        """After all calls that were made before. Again: no effect."""

        def close_connection() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        if not self._closed:
            self._closed = True
            await asyncio.wrap_future(self._executor.submit(close_connection))
            self._executor.shutdown(wait=False)

    async def read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Raises what ``function`` raises, and RegistryUnavailable."""
        return await self._call(function, writes=False)

    async def write(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """``function`` has had its effect on the disk when this returns, and none when it raises.

        It may be run again in another transaction, so it has no effects but those on the database. The thread finishes
        it even when its caller was cancelled: it is whole or not there, never half.
        """
        return await self._call(function, writes=True)

    async def _call(self, function: Callable[[sqlite3.Connection], T], *, writes: bool) -> T:
        if self._closed:
            raise RegistryUnavailable("the registry is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(function, writes, future))
        self._executor.submit(self._run_waiting)
        return await future

    def _run_waiting(self) -> None:
        """Those that one call before it has not taken along."""
        calls: list[_Call] = []
        while self._waiting and len(calls) < MAX_TOGETHER:
            calls.append(self._waiting.popleft())
        if not calls:
            return
        if not self._ran_together(calls):
            for call in calls:
                self._run_alone(call)
        calls[0].future.get_loop().call_soon_threadsafe(answer, calls)

    def _ran_together(self, calls: Sequence[_Call]) -> bool:
        """In one transaction; False when there is nothing to share, or SQLite failed: then nothing has happened."""
        if self._connection is None or sum(call.writes for call in calls) < 2:
            return False
        try:
            with transaction(self._connection) as db:
                for call in calls:
                    run_in_savepoint(call, db)
        except Exception:  # noqa: BLE001 - it is met again by the call that it belongs to
            return False
        return True

    def _run_alone(self, call: _Call) -> None:
        call.error = None
        try:
            call.result = self._run(call)
        except sqlite3.Error as e:
            call.error = RegistryUnavailable(f"the registry {self._path} failed: {e}; {what_to_do(e, self._path)}")
            call.error.__cause__ = e
        except BaseException as e:  # noqa: BLE001 - it is raised where the call was made
            call.error = e

    def _run(self, call: _Call) -> Any:
        if self._connection is None:
            raise RegistryUnavailable("the registry is closed")
        if not call.writes:
            return call.function(self._connection)
        with transaction(self._connection) as db:
            return call.function(db)


def run_in_savepoint(call: _Call, db: sqlite3.Connection) -> None:
    """An error of ours is this call's own; one of SQLite's speaks against all that share its transaction."""
    db.execute("SAVEPOINT one")
    call.error = None
    try:
        call.result = call.function(db)
    except CoordinatorError as e:
        call.error = e
        db.execute("ROLLBACK TO one")
    db.execute("RELEASE one")


def answer(calls: Sequence[_Call]) -> None:
    """All of them, in order."""
    for call in calls:
        call.answer()


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """BEGIN IMMEDIATE … COMMIT, so that what is compared and what is set belong together."""
    db.execute("BEGIN IMMEDIATE")
    with db:  # commits, or rolls back on any exception
        yield db
