"""What only the registry in a file has: kill -9, other versions of the file, strange files, a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from registry_kit import finish, open_sqlite, outcome, plain, plain_outcome, session, shown, turn

from kvferry.coordinator.errors import (
    CannotStart,
    RegistryUnavailable,
)
from kvferry.coordinator.registry import (
    AnswerForm,
    Registry,
)
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.coordinator.state_directory import StateDirectory

WRITER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import registry_kit as kit

async def main():
    registry = await kit.open_sqlite(Path({folder!r}))
    session_id = f"s{{registry.generation}}"
    await registry.create_session(kit.session(session_id))
    history = 0
    for number in range(10**6):
        await registry.begin_turn(kit.turn(f"t{{number}}", session_id=session_id, history=history))
        print("begun", session_id, number, flush=True)
        await kit.finish(registry, f"t{{number}}", session_id=session_id)
        print("done", session_id, number, flush=True)
        history += 4

asyncio.run(main())
"""


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    random_instants = random.Random(2)
    script = WRITER.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    for generation in range(1, 7):
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
        assert writer.stdout is not None
        said = [writer.stdout.readline().split() for _ in range(random_instants.randrange(1, 40))]
        writer.send_signal(signal.SIGKILL)
        said += [line.split() for line in writer.stdout.read().splitlines() if line.count(" ") == 2]
        writer.stdout.close()
        writer.wait()
        what, session_id, number = said[-1]
        registry = await open_sqlite(tmp_path)
        try:
            assert registry.generation == 2 * generation
            turns = await registry.list_turns(session_id)
            n_done = sum(t.outcome is not None for t in turns)
            n_acknowledged = int(number) + (what == "done")
            assert n_done in (n_acknowledged, n_acknowledged + 1)  # the one in flight may have made it
            assert len(turns) >= int(number) + 1
            record = await registry.get_session(session_id)
            assert record.n_turns == n_done
            assert record.n_tokens == len(await registry.session_tokens(session_id)) == 4 * n_done
            assert [t.turn_id for t in await registry.open_turns() if t.session_id == session_id] == [
                t.turn_id for t in turns if t.outcome is None
            ]
        finally:
            await registry.close()


async def test_a_state_of_a_newer_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "registry.sqlite3") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(CannotStart, match=r"version 99 .* --state"):
        await open_sqlite(tmp_path)


async def test_a_state_of_the_next_version_can_be_gone_back_from(tmp_path: Path) -> None:
    """It has one more column, and says that this version may use it."""
    import sqlite3

    before = await open_sqlite(tmp_path)
    await before.create_session(session())
    await before.close()
    with sqlite3.connect(tmp_path / "registry.sqlite3") as db:
        db.executescript("ALTER TABLE sessions ADD COLUMN mood TEXT NOT NULL DEFAULT ''; PRAGMA user_version = 7")
        db.execute("UPDATE meta SET value = '6' WHERE key = 'readable_since'")
    db.close()
    back = await open_sqlite(tmp_path)
    assert (await back.get_session("s")).session_id == "s"
    await back.create_session(session("s2"))
    await back.begin_turn(turn("t1"))
    await back.close()
    with sqlite3.connect(tmp_path / "registry.sqlite3") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (7,)
        db.execute("UPDATE meta SET value = '7' WHERE key = 'readable_since'")
    db.close()
    with pytest.raises(CannotStart, match="version 7"):
        await open_sqlite(tmp_path)


WITHOUT_EXPIRY = "DROP INDEX sessions_by_expiry; ALTER TABLE sessions DROP COLUMN expires_after_s;"
WITHOUT_TENANTS = f"{WITHOUT_EXPIRY} ALTER TABLE sessions DROP COLUMN tenant;"
TERMS = "".join(f"ALTER TABLE turns DROP COLUMN {name};" for name in ("priority", "deadline_ms", "n_samples"))
WITHOUT_TERMS = f"{WITHOUT_TENANTS} {TERMS}"
WITHOUT_PICTURES = f"{WITHOUT_TERMS} ALTER TABLE turns DROP COLUMN pictures; DROP TABLE pixel_uses; DROP TABLE pixels;"


@pytest.mark.parametrize(
    ("version", "undo"),
    [
        (1, f"{WITHOUT_PICTURES} ALTER TABLE turns DROP COLUMN form;"),
        (2, WITHOUT_PICTURES),
        (3, WITHOUT_TERMS),
        (4, WITHOUT_TENANTS),
        (5, WITHOUT_EXPIRY),
    ],
    ids=["1", "2", "3", "4", "5"],
)
async def test_a_state_of_an_older_version_is_brought_up_to_date(tmp_path: Path, version: int, undo: str) -> None:
    import sqlite3

    before = await open_sqlite(tmp_path)
    await before.create_session(session())
    await before.begin_turn(turn("t1"))
    await finish(before, "t1")
    await before.begin_turn(turn("t2", history=4))
    await before.close()
    with sqlite3.connect(tmp_path / "registry.sqlite3") as db:  # as a program before this one left it
        db.executescript(f"{undo} PRAGMA user_version = {version}")
    db.close()
    for _ in range(2):
        after = await open_sqlite(tmp_path)
        assert next(plain(t) for t in await after.list_turns("s"))["outcome"] == plain_outcome(outcome())
        assert [t.turn_id for t in await after.open_turns()] == ["t2"]
        assert (await after.get_turn("s", "t2")).form == AnswerForm()
        assert (await after.get_session("s")).tenant == ""
        await after.close()
    with sqlite3.connect(tmp_path / "registry.sqlite3") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (6,)
    db.close()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "registry.sqlite3").write_bytes(b"something else entirely, and long enough to be looked at" * 10)
    with pytest.raises(CannotStart, match=r"cannot be opened: .* backup of it in its place, or move it away"):
        await open_sqlite(tmp_path)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("CREATE TABLE meta (a)", "another program's"),
        ("CREATE TABLE songs (a); PRAGMA user_version = 1", "another program's"),
        ("CREATE TABLE songs (a); PRAGMA user_version = 6", "another program's"),
        (
            "CREATE TABLE meta AS SELECT 'coordinator_id' AS key, 'c' AS value; PRAGMA user_version = 6",
            "backup of it in its place",
        ),
    ],
)
async def test_a_database_of_something_else_is_refused_with_what_to_do(tmp_path: Path, script: str, says: str) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "registry.sqlite3") as db:
        db.executescript(script)
    db.close()
    with pytest.raises(CannotStart, match=says):
        await open_sqlite(tmp_path)


async def until_it_fails(registry: Registry) -> None:
    for number in range(200):
        await registry.create_session(session(f"s{number}"))


async def test_a_full_disk_is_told_with_how_little_is_free(small_disk: Path) -> None:
    registry = await open_sqlite(small_disk)
    try:
        room = small_disk / "theirs"
        with contextlib.suppress(OSError), room.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        with pytest.raises(RegistryUnavailable, match=r"its disk has \d+ bytes free: make room there"):
            await until_it_fails(registry)
        with pytest.raises(CannotStart, match=r"disk has \d+ bytes free: make room there"):
            StateDirectory(small_disk / "another").acquire()
    finally:
        await registry.close()


async def test_commits_reach_the_disk(tmp_path: Path) -> None:
    registry = await SqliteRegistry(tmp_path / "registry.sqlite3").open(new_coordinator_id="c1")
    try:
        modes = await registry._thread.read(
            lambda db: [db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("journal_mode", "synchronous")]
        )
        assert modes == ["wal", 2]  # 2 = FULL
    finally:
        await registry.close()


async def test_pixels_are_found_though_another_call_of_the_same_transaction_fails(tmp_path: Path) -> None:
    """The calls are then made once more, each for itself."""
    registry = await open_sqlite(tmp_path)
    await registry.create_session(session())
    await registry.begin_turn(shown(turn(), "x"), {"x": b"X"})
    go_on = threading.Event()
    busy = asyncio.ensure_future(registry._thread.read(lambda _: go_on.wait(10)))
    await asyncio.sleep(0.05)
    failing = [registry._thread.write(lambda db: db.execute("INSERT INTO nowhere VALUES (1)")) for _ in range(2)]
    together = asyncio.gather(registry.pixels(name for name in "x"), *failing, return_exceptions=True)
    await asyncio.sleep(0)
    go_on.set()
    await busy
    found, *failed = await together
    assert found == {"x": b"X"}
    assert [type(error) for error in failed] == [RegistryUnavailable] * 2
    await registry.close()
