"""What every registry keeps. ``open_registry`` opens one again on the same state, as a restarted coordinator does."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from registry_kit import Open, finish, outcome, plain, session, turn

from kvferry.coordinator.errors import (
    RegistryUnavailable,
    SessionBusy,
    SessionExists,
    StaleEpoch,
    TurnExists,
    UnknownSession,
    UnknownTurn,
)
from kvferry.coordinator.registry import (
    NO_PIXELS,
    AnswerForm,
    FinishReason,
    Message,
    PageKey,
    Registry,
    SessionRecord,
)
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.engine.text.messages import Tool, ToolCall


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
