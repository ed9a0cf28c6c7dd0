"""What every registry does with copies of sessions, with sessions that expire, and with the pixels they share."""

from __future__ import annotations

import dataclasses

import pytest
from registry_kit import Open, finish, outcome, plain, session, shown, turn

from kvferry.coordinator.errors import (
    IndexOutOfRange,
    SessionBusy,
    SessionExists,
)
from kvferry.coordinator.registry import (
    FinishReason,
    Registry,
)


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
