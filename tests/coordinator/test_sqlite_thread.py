"""Calls to the registry's thread: in order, together where they wait together, and each with its own end."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvferry.coordinator.errors import RegistryUnavailable, SessionBusy
from kvferry.coordinator.sqlite_thread import SqliteThread


@pytest.fixture
async def thread(tmp_path: Path) -> AsyncIterator[SqliteThread]:
    opened = SqliteThread(tmp_path / "file.sqlite3")
    await opened.open(lambda db: db.execute("CREATE TABLE t (x UNIQUE)"))
    yield opened
    await opened.close()


def adds(x: int) -> Callable[[sqlite3.Connection], int]:
    def add(db: sqlite3.Connection) -> int:
        db.execute("INSERT INTO t VALUES (?)", (x,))
        if x < 0:
            raise SessionBusy("after its effect")
        return x

    return add


def kept(db: sqlite3.Connection) -> list[int]:
    return [row["x"] for row in db.execute("SELECT x FROM t ORDER BY rowid")]


async def at_once(thread: SqliteThread, *calls: Callable[[sqlite3.Connection], object]) -> tuple[list[object], int]:
    """What became of writes that all came while the thread was busy, and the number of commits."""
    go_on, statements = threading.Event(), list[str]()

    def busy(db: sqlite3.Connection) -> None:
        go_on.wait(10)
        db.set_trace_callback(statements.append)

    waiting = asyncio.ensure_future(thread.read(busy))
    await asyncio.sleep(0.05)
    results = asyncio.gather(*(thread.write(call) for call in calls), return_exceptions=True)
    await asyncio.sleep(0)
    go_on.set()
    await waiting
    return list(await results), statements.count("COMMIT")


async def test_calls_that_wait_together_are_committed_together(thread: SqliteThread) -> None:
    assert await at_once(thread, adds(3), adds(1), kept, adds(2)) == ([3, 1, [3, 1], 2], 1)
    assert await thread.read(kept) == [3, 1, 2]


async def test_one_that_is_refused_leaves_no_trace_and_harms_none_beside_it(thread: SqliteThread) -> None:
    (first, refused, last), n_commits = await at_once(thread, adds(1), adds(-2), adds(3))
    assert (first, last, n_commits) == (1, 3, 1)
    assert isinstance(refused, SessionBusy)
    assert await thread.read(kept) == [1, 3]


async def test_one_that_fails_on_the_disk_fails_alone(thread: SqliteThread) -> None:
    (first, failed, last), n_commits = await at_once(thread, adds(1), adds(1), adds(3))
    assert (first, last, n_commits) == (1, 3, 2)
    assert isinstance(failed, RegistryUnavailable)
    assert "UNIQUE constraint failed" in str(failed)
    assert await thread.read(kept) == [1, 3]


async def test_a_call_whose_caller_is_gone_is_done_all_the_same(thread: SqliteThread) -> None:
    leaving = asyncio.ensure_future(thread.write(adds(1)))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await thread.read(kept) == [1]


async def test_a_closed_one_says_so(thread: SqliteThread) -> None:
    await thread.close()
    await thread.close()
    with pytest.raises(RegistryUnavailable, match="closed"):
        await thread.read(kept)
