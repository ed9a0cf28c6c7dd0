"""What every registry keeps. ``open_registry`` opens one again on the same state, as a restarted coordinator does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry.coordinator.errors import (
    CannotStart,
    IndexOutOfRange,
    RegistryUnavailable,
    SessionBusy,
    SessionExists,
    StaleEpoch,
    TurnExists,
    UnknownSession,
    UnknownTurn,
)
from kvferry.coordinator.etcd.registry import EtcdRegistry
from kvferry.coordinator.memory_registry import Ledger, MemoryRegistry
from kvferry.coordinator.registry import (
    NO_PIXELS,
    AnswerForm,
    FinishReason,
    Message,
    PageKey,
    Picture,
    Registry,
    SessionRecord,
    TurnOutcome,
    TurnRecord,
)
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.coordinator.state_directory import StateDirectory
from kvferry.engine.text.messages import Tool, ToolCall

Open = Callable[[], Awaitable[Registry]]


async def open_sqlite(folder: Path) -> Registry:
    return await SqliteRegistry(folder / "registry.sqlite3").open(new_coordinator_id="c1")


LEDGERS: dict[Path, Ledger] = {}


async def open_memory(folder: Path) -> Registry:
    """What it leaves behind stays as long as the test."""
    return await MemoryRegistry(LEDGERS.setdefault(folder, Ledger())).open("c1")


@pytest.fixture(params=["sqlite", "memory", "etcd"])
async def open_registry(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[Registry] = []
    # asked for only where it is needed: where etcd is not installed, its tests alone are skipped
    members = request.getfixturevalue("etcd").endpoints if request.param == "etcd" else []

    async def open_one() -> Registry:
        match request.param:
            case "sqlite":
                return await open_sqlite(tmp_path)
            case "memory":
                return await open_memory(tmp_path)
        return await EtcdRegistry(members, prefix=tmp_path.name).open("c1")

    async def open_again() -> Registry:
        for registry in opened:
            await registry.close()
        opened[:] = [await open_one()]
        return opened[0]

    yield open_again
    for registry in opened:
        await registry.close()


@pytest.fixture
async def registry(open_registry: Open) -> Registry:
    return await open_registry()


def session(session_id: str = "s", at_ms: int = 1) -> SessionRecord:
    return SessionRecord(
        session_id=session_id, model="m", tokenizer_digest="d", created_at_ms=at_ms, updated_at_ms=at_ms
    )


def turn(
    turn_id: str = "t1", *, session_id: str = "s", history: int = 0, prompt: tuple[int, ...] = (1, 2), at_ms: int = 5
) -> TurnRecord:
    return TurnRecord(
        session_id=session_id, turn_id=turn_id, messages=(Message("system", "be"), Message("user", "hé \0 'q\"")),
        n_history_tokens=history, prompt_ids=np.array(prompt, np.int32), sampling=b"\x00\xff", max_tokens=7,
        stop=("a", "\n"), digest="d", created_at_ms=at_ms,
    )  # fmt: skip


def outcome(
    answer: tuple[int, ...] = (3, 4), reason: FinishReason = FinishReason.END, **changes: object
) -> TurnOutcome:
    fields = {
        "reason": reason,
        "answer_ids": np.array(answer, np.int32),
        "answer_text": "ho €",
        "logprobs": b"\x01",
        "total_seconds": 1.25,
        "n_placements": 2,
    }
    return TurnOutcome(**{**fields, **changes})


async def finish(
    registry: Registry, turn_id: str = "t1", result: TurnOutcome | None = None, *, session_id: str = "s", at_ms: int = 9
) -> int:
    epoch = await registry.place_turn(session_id, turn_id, "fp")
    await registry.finish_turn(session_id, turn_id, epoch, result or outcome(), [b"p1", b"p2"], at_ms)
    return epoch


def plain(record: TurnRecord) -> dict[str, object]:
    """Comparable: arrays as lists."""
    fields = {**dataclasses.asdict(record), "prompt_ids": record.prompt_ids.tolist()}
    if record.outcome is not None:
        fields["outcome"] = {**dataclasses.asdict(record.outcome), "answer_ids": record.outcome.answer_ids.tolist()}
    return fields


def plain_outcome(result: TurnOutcome) -> dict[str, object]:
    return {**dataclasses.asdict(result), "answer_ids": result.answer_ids.tolist()}


# The registry itself.


async def test_the_form_of_an_answer_and_all_of_a_message_are_kept(open_registry: Open) -> None:
    call = ToolCall("f", {"ä": [1, None]}, "id")
    record = dataclasses.replace(
        turn(),
        messages=(
            Message("user", "q"),
            Message("assistant", "", "", (call,)),
            Message("assistant", "b", None, (call, call)),
            Message("tool", "25", tool_call_id="id"),
        ),
        form=AnswerForm(
            tools=(Tool("f", "does €", '{"type": "object"}'), Tool("g")), thinking=False, grammar='start: "a"\n',
            prompt_opened_thinking=True, reads_thinking=False,
        ),
    )  # fmt: skip
    registry = await open_registry()
    await registry.create_session(session())
    await registry.begin_turn(record)
    await finish(registry)
    await registry.fork_session("s", session("fork"), None)
    registry = await open_registry()
    for session_id in ("s", "fork"):
        (kept,) = await registry.list_turns(session_id)
        assert kept.messages == record.messages
        assert kept.form == record.form


async def test_each_opening_raises_the_generation_unless_it_is_shared_and_keeps_the_id(open_registry: Open) -> None:
    registries = [await open_registry() for _ in range(3)]
    seen = [(r.coordinator_id, r.generation) for r in registries]
    assert seen == [("c1", 1), ("c1", 1), ("c1", 1)] if registries[0].is_shared else [("c1", 1), ("c1", 2), ("c1", 3)]


async def test_a_new_file_begins_where_it_is_told_and_the_operator_can_only_raise_it(tmp_path: Path) -> None:
    async def opened(**how: int) -> tuple[int, bool]:
        registry = await SqliteRegistry(tmp_path / "r.sqlite3").open("c1", **how)
        await registry.close()
        return registry.generation, registry.is_new

    assert await opened(first_generation=1_000) == (1_000, True)
    assert await opened(first_generation=9_000) == (1_001, False)  # an old copy goes on from its own number
    assert await opened(generation_at_least=7) == (1_002, False)
    assert await opened(generation_at_least=5_000) == (5_000, False)
    assert await opened() == (5_001, False)


async def test_a_closed_registry_says_so(registry: Registry) -> None:
    await registry.close()
    with pytest.raises(RegistryUnavailable):
        await registry.get_session("s")


# Sessions.


async def test_a_session_is_kept(registry: Registry, open_registry: Open) -> None:
    await registry.create_session(session())
    registry = await open_registry()
    assert await registry.get_session("s") == session()
    assert (await registry.session_tokens("s")).tolist() == []
    assert (await registry.counts()).n_sessions == 1


async def test_a_session_and_its_forks_are_one_tenants(registry: Registry, open_registry: Open) -> None:
    await registry.create_session(dataclasses.replace(session(), tenant="acme"))
    await registry.fork_session("s", session("f"), None)
    again = await open_registry()
    assert [s.tenant for s in await again.list_sessions(9, None)] == ["acme", "acme"]


async def test_a_session_is_made_once(registry: Registry) -> None:
    await registry.create_session(session())
    with pytest.raises(SessionExists, match="session s"):
        await registry.create_session(session(at_ms=2))
    assert (await registry.get_session("s")).created_at_ms == 1


async def test_an_unknown_session_is_named_by_every_method(registry: Registry) -> None:
    calls = [
        registry.get_session("x"), registry.session_tokens("x"), registry.list_turns("x"), registry.get_turn("x", "t"),
        registry.begin_turn(turn(session_id="x")), registry.delete_session("x"), registry.list_placements("x"),
        registry.fork_session("x", session("y"), None),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UnknownSession, match="session x"):
            await call


async def test_sessions_are_listed_by_last_use_page_by_page(registry: Registry) -> None:
    for number, at_ms in enumerate([5, 9, 7, 7, 1]):
        await registry.create_session(session(f"s{number}", at_ms))
    pages, after = [], None
    while page := await registry.list_sessions(2, after):
        pages.append([s.session_id for s in page])
        after = PageKey(updated_at_ms=page[-1].updated_at_ms, session_id=page[-1].session_id)
    assert pages == [["s1", "s3"], ["s2", "s0"], ["s4"]]
    await registry.begin_turn(turn(session_id="s4", at_ms=20))
    assert (await registry.list_sessions(1, None))[0].session_id == "s4"


async def test_a_deleted_session_leaves_nothing_behind(registry: Registry, open_registry: Open) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    with pytest.raises(SessionBusy, match="t1"):
        await registry.delete_session("s")
    await finish(registry)
    await registry.delete_session("s")
    registry = await open_registry()
    with pytest.raises(UnknownSession):
        await registry.get_session("s")
    await registry.create_session(session())
    assert await registry.list_turns("s") == []
    assert await registry.list_placements("s") == {}


# Turns.


async def test_an_open_turn_is_kept_whole(registry: Registry, open_registry: Open) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    registry = await open_registry()
    assert plain((await registry.open_turns())[0]) == plain(turn())
    assert await registry.open_turns(known={("s", "t1")}) == []
    assert plain(await registry.get_turn("s", "t1")) == plain(turn())
    assert (await registry.get_session("s")).open_turn_id == "t1"
    assert (await registry.session_tokens("s")).tolist() == []
    assert (await registry.counts()).n_open_turns == 1


async def test_a_finished_turn_adds_its_prompt_and_its_answer_to_the_session(
    registry: Registry, open_registry: Open
) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    epoch = await finish(registry)
    await registry.begin_turn(turn("t2", history=4, prompt=(2**31 - 1,)))
    await finish(registry, "t2", outcome((8,), FinishReason.CANCELLED))
    registry = await open_registry()
    record = await registry.get_session("s")
    assert (await registry.session_tokens("s")).tolist() == [1, 2, 3, 4, 2**31 - 1, 8]
    assert (record.n_tokens, record.n_turns, record.open_turn_id, record.updated_at_ms, record.epoch) == (
        6,
        2,
        "",
        9,
        2,
    )
    first, second = await registry.list_turns("s")
    assert plain(first) == plain(dataclasses.replace(turn(), fingerprint="fp", epoch=epoch, outcome=outcome()))
    assert second.turn_id == (await registry.get_turn("s", "")).turn_id == "t2"
    assert await registry.list_placements("s") == {"t1": [b"p1", b"p2"], "t2": [b"p1", b"p2"]}
    assert await registry.open_turns() == []


async def test_a_failed_turn_is_remembered_and_adds_nothing(registry: Registry) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    await finish(
        registry, result=outcome(reason=FinishReason.ERROR, error_code="placements_exhausted", error="gave up")
    )
    record = await registry.get_session("s")
    assert (record.n_tokens, record.n_turns, record.open_turn_id) == (0, 0, "")
    assert (await registry.session_tokens("s")).tolist() == []
    kept = (await registry.get_turn("s", "t1")).outcome
    assert kept is not None
    assert (kept.reason, kept.error_code, kept.error) == (FinishReason.ERROR, "placements_exhausted", "gave up")
    await registry.begin_turn(turn("t2"))


async def test_a_turn_begins_once_and_alone(registry: Registry) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    with pytest.raises(TurnExists):
        await registry.begin_turn(turn())
    with pytest.raises(SessionBusy, match="t1"):
        await registry.begin_turn(turn("t2"))
    await finish(registry)
    with pytest.raises(TurnExists):
        await registry.begin_turn(turn(history=4))
    with pytest.raises(SessionBusy, match="grew from 0 to 4"):
        await registry.begin_turn(turn("t2", history=0))
    assert len(await registry.list_turns("s")) == 1


async def test_of_many_that_begin_at_once_one_succeeds(registry: Registry) -> None:
    await registry.create_session(session())
    results = await asyncio.gather(*(registry.begin_turn(turn(f"t{n}")) for n in range(20)), return_exceptions=True)
    assert results.count(0) == 1
    assert all(isinstance(r, SessionBusy) for r in results if r != 0)


async def test_a_turn_that_begins_with_a_placement_is_as_one_that_is_placed_at_once(
    registry: Registry, open_registry: Open
) -> None:
    await registry.create_session(session())
    assert await registry.begin_turn(turn(), NO_PIXELS, "fp") == 1
    registry = await open_registry()
    record, turns = await registry.session_and_turns("s")
    assert (record.epoch, record.open_turn_id) == (1, "t1")
    assert [plain(one) for one in turns] == [plain(dataclasses.replace(turn(), fingerprint="fp", epoch=1))]
    with pytest.raises(StaleEpoch):
        await registry.finish_turn("s", "t1", 0, outcome(), [], 9)
    assert await registry.place_turn("s", "t1", "fp2") == 2
    await registry.finish_turn("s", "t1", 2, outcome(), [], 9)
    assert await registry.begin_turn(turn("t2", history=4)) == 0
    with pytest.raises(SessionBusy):
        await registry.begin_turn(turn("t3", history=4), NO_PIXELS, "fp")
    assert (await registry.get_session("s")).epoch == 2
    await finish(registry, "t2")
    assert await registry.begin_turn(turn("t3", history=8), NO_PIXELS, "fp") == 4
    with pytest.raises(UnknownSession):
        await registry.session_and_turns("nobody's")


async def test_epochs_only_grow_across_turns_and_openings(registry: Registry, open_registry: Open) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    epochs = [await registry.place_turn("s", "t1", "fp") for _ in range(2)]
    registry = await open_registry()
    epochs.append(await registry.place_turn("s", "t1", "fp2"))
    open_turn = await registry.get_turn("s", "t1")
    assert (open_turn.epoch, open_turn.fingerprint) == (3, "fp2")
    await registry.finish_turn("s", "t1", 3, outcome(), [], 9)
    await registry.begin_turn(turn("t2", history=4))
    epochs.append(await registry.place_turn("s", "t2", "fp"))
    assert epochs == [1, 2, 3, 4]


async def create(registry: Registry) -> SessionRecord:
    return await registry.create_session(session())


async def fork(registry: Registry) -> SessionRecord:
    await registry.create_session(session("parent"))
    return await registry.fork_session("parent", session(), None)


async def bring_in(registry: Registry) -> SessionRecord:
    return await registry.import_session(dataclasses.replace(session(), epoch=1), [])


@pytest.mark.parametrize("make", [create, fork, bring_in])
async def test_a_session_with_a_deleted_ones_name_goes_on_above_its_epochs(
    registry: Registry, open_registry: Open, make: Callable[[Registry], Awaitable[SessionRecord]]
) -> None:
    """Nodes remember the name, and would refuse what began anew as long as it was below."""
    await registry.create_session(session())
    await registry.begin_turn(turn())
    for _ in range(2):
        await registry.place_turn("s", "t1", "fp")
    await finish(registry)
    await registry.delete_session("s")
    registry = await open_registry()
    await registry.create_session(session("passing"))
    await registry.delete_session("passing")  # a lower one does not lower it
    made = await make(registry)
    assert made.epoch >= 3
    assert made == await registry.get_session("s")
    await registry.begin_turn(turn("t2"))
    assert await registry.place_turn("s", "t2", "fp") > 3


async def test_a_turn_is_finished_once_and_by_the_newest_epoch_only(registry: Registry) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    await registry.place_turn("s", "t1", "fp")
    await registry.place_turn("s", "t1", "fp")
    with pytest.raises(StaleEpoch):
        await registry.finish_turn("s", "t1", 1, outcome(), [], 9)
    await registry.finish_turn("s", "t1", 2, outcome(), [], 9)
    with pytest.raises(UnknownTurn):
        await registry.finish_turn("s", "t1", 2, outcome(), [], 9)
    with pytest.raises(UnknownTurn):
        await registry.place_turn("s", "t1", "fp")
    assert (await registry.get_session("s")).n_turns == 1


async def test_an_unknown_turn_is_named(registry: Registry) -> None:
    await registry.create_session(session())
    with pytest.raises(UnknownTurn, match="no turn yet"):
        await registry.get_turn("s", "")
    with pytest.raises(UnknownTurn, match="no turn t9"):
        await registry.get_turn("s", "t9")


# Forks.


async def test_a_fork_begins_with_the_first_turns_and_goes_its_own_way(registry: Registry) -> None:
    await registry.create_session(session())
    for number, history in enumerate((0, 4, 8)):
        await registry.begin_turn(turn(f"t{number}", history=history, prompt=(10 * number, 1)))
        failed = outcome(reason=FinishReason.ERROR) if number == 1 else outcome()
        await finish(registry, f"t{number}", failed)
        if number == 1:
            break
    await registry.begin_turn(turn("t2", history=4, prompt=(20, 1)))
    await finish(registry, "t2")
    whole = await registry.fork_session("s", session("all", 30), None)
    first = await registry.fork_session("s", session("one", 30), 1)
    none = await registry.fork_session("s", session("none", 30), 0)
    assert [(f.n_turns, f.n_tokens, f.forked_from, f.model) for f in (whole, first, none)] == [
        (2, 8, "s", "m"), (1, 4, "s", "m"), (0, 0, "s", "m"),
    ]  # fmt: skip
    assert await registry.get_session("all") == whole
    assert (await registry.session_tokens("all")).tolist() == [0, 1, 3, 4, 20, 1, 3, 4]
    await registry.begin_turn(turn("new", session_id="one", history=4))
    await finish(registry, "new", session_id="one")
    await registry.delete_session("s")
    assert (await registry.session_tokens("one")).tolist() == [0, 1, 3, 4, 1, 2, 3, 4]


async def test_a_fork_of_more_turns_than_there_are_or_onto_a_name_in_use_is_refused(registry: Registry) -> None:
    await registry.create_session(session())
    with pytest.raises(IndexOutOfRange, match="0 finished turns, not 1"):
        await registry.fork_session("s", session("f"), 1)
    with pytest.raises(SessionExists):
        await registry.fork_session("s", session("s"), None)


async def test_a_fork_may_end_with_another_outcome_than_its_parent(registry: Registry) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    await finish(registry)
    shorter = outcome(answer=(3,), reason=FinishReason.CANCELLED, answer_text="h")
    made = await registry.fork_session("s", session("f"), 1, shorter)
    assert (made.n_tokens, made.n_turns) == (3, 1)
    assert (await registry.session_tokens("f")).tolist() == [1, 2, 3]
    assert plain((await registry.list_turns("f"))[0])["outcome"]["answer_text"] == "h"
    assert (await registry.session_tokens("s")).tolist() == [1, 2, 3, 4]
    await registry.begin_turn(turn("t2", session_id="f", history=3))


async def test_what_nobody_used_for_long_is_found_the_longest_unused_first(registry: Registry) -> None:
    for name, at_ms in (("b", 20), ("a", 10), ("open", 5), ("new", 99)):
        await registry.create_session(session(name, at_ms))
    await registry.begin_turn(turn(session_id="open", at_ms=6))
    assert await registry.expired_sessions(now_ms=60, before_ms=50, limit=10) == ["a", "b"]
    assert await registry.expired_sessions(now_ms=60, before_ms=50, limit=1) == ["a"]
    assert await registry.expired_sessions(now_ms=60, before_ms=10, limit=10) == []


async def test_a_session_expires_after_the_time_that_it_says_itself(registry: Registry) -> None:
    for name, seconds in (("never", 0), ("soon", 1), ("later", 9)):
        await registry.create_session(dataclasses.replace(session(name, 10), expires_after_s=seconds))
    assert await registry.expired_sessions(now_ms=1_010, before_ms=0, limit=10) == []
    assert await registry.expired_sessions(now_ms=1_011, before_ms=0, limit=10) == ["soon"]
    assert await registry.expired_sessions(now_ms=9_999, before_ms=0, limit=10) in (
        ["later", "soon"],
        ["soon", "later"],
    )
    await registry.begin_turn(turn(session_id="soon", at_ms=2_000))
    assert await registry.expired_sessions(now_ms=9_000, before_ms=0, limit=10) == []
    await finish(registry, session_id="soon", at_ms=3_000)
    assert await registry.expired_sessions(now_ms=4_000, before_ms=0, limit=10) == []
    assert await registry.expired_sessions(now_ms=4_001, before_ms=0, limit=10) == ["soon"]
    assert (await registry.fork_session("soon", session("fork", 3_500), None)).expires_after_s == 1
    await registry.delete_session("soon")
    assert await registry.expired_sessions(now_ms=4_501, before_ms=0, limit=10) == ["fork"]


# Crashes.

WRITER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_registry as kit

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


async def test_what_a_turn_was_asked_with_is_kept(registry: Registry, open_registry: Open) -> None:
    await registry.create_session(session())
    await registry.begin_turn(dataclasses.replace(turn(), priority=-7, deadline_ms=2**41, n_samples=3))
    (kept,) = await (await open_registry()).open_turns()
    assert (kept.priority, kept.deadline_ms, kept.n_samples) == (-7, 2**41, 3)


async def test_an_imported_session_goes_on_where_it_ended(registry: Registry, open_registry: Open) -> None:
    turns = [
        dataclasses.replace(shown(turn("t1"), "a"), outcome=outcome(), epoch=4),
        dataclasses.replace(turn("t2", history=4, prompt=(5,)), outcome=outcome((6,)), epoch=7),
    ]
    made = dataclasses.replace(session(), epoch=7, n_tokens=6, n_turns=2)
    await registry.import_session(made, turns, {"a": b"png a"})
    with pytest.raises(SessionExists):
        await registry.import_session(session(), [])
    registry = await open_registry()
    assert await registry.get_session("s") == made
    assert [plain(t) for t in await registry.list_turns("s")] == [plain(t) for t in turns]
    assert (await registry.session_tokens("s")).tolist() == [1, 2, 3, 4, 5, 6]
    assert await registry.pixels(["a"]) == {"a": b"png a"}
    await registry.begin_turn(turn("t3", history=6))
    assert await registry.place_turn("s", "t3", "fp") == 8
    await registry.finish_turn("s", "t3", 8, outcome(), [], 9)
    await registry.delete_session("s")
    assert await registry.pixels(["a"]) == {}


# SQLite alone.


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


def shown(turn_record: TurnRecord, *names: str) -> TurnRecord:
    pictures = tuple(
        Picture(content_hash=name, message=1, at=0, start=i, rows=2, cols=2, n_tokens=1, width=32, height=32, n_bytes=3)
        for i, name in enumerate(names)
    )
    return dataclasses.replace(turn_record, pictures=pictures)


async def test_pixels_are_kept_once_and_as_long_as_a_session_shows_them(open_registry: Open) -> None:
    registry = await open_registry()
    for name in ("a", "b"):
        await registry.create_session(session(name))
    first = shown(turn(session_id="a"), "x", "y")
    await registry.begin_turn(first, {"x": b"X\0", "y": b"Y"})
    await registry.begin_turn(shown(turn(session_id="b"), "y", "z"), {"y": b"Y", "z": b"Z"})
    await finish(registry, session_id="a")
    await finish(registry, session_id="b")
    await registry.fork_session("a", session("fork"), None)
    registry = await open_registry()
    assert (await registry.get_turn("a", "")).pictures == first.pictures
    assert await registry.pixels(["x", "y", "z", "none"]) == {"x": b"X\0", "y": b"Y", "z": b"Z"}
    await registry.delete_session("a")
    assert set(await registry.pixels("xyz")) == {"x", "y", "z"}
    await registry.delete_session("fork")
    assert set(await registry.pixels("xyz")) == {"y", "z"}
    await registry.delete_session("b")
    assert await registry.pixels("xyz") == {}


async def test_pixels_of_a_turn_that_may_not_begin_are_not_kept(registry: Registry) -> None:
    await registry.create_session(session())
    await registry.begin_turn(turn())
    with pytest.raises(SessionBusy):
        await registry.begin_turn(shown(turn("t2"), "x"), {"x": b"X"})
    assert await registry.pixels("x") == {}


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
