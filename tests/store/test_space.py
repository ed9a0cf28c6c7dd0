"""What has to go for a snapshot to fit: the decision alone, on listings made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.store.space import Budget, Entry, RoomPlan, Survey, plan_room

A, B, C = Entry("a", 100, 1), Entry("b", 100, 2), Entry("c", 100, 3)
OLD, NEW = Entry("old", 50, 1), Entry("new", 50, 2)


def _survey(*snapshots: Entry, trash: tuple[Entry, ...] = (), temp_bytes: int = 0, n_temps: int = 0) -> Survey:
    return Survey(snapshots, trash, temp_bytes, n_temps)


@pytest.mark.parametrize(
    ("survey", "budget", "shortage_bytes", "protected", "plan"),
    [
        # all fits: nothing goes
        (_survey(A, B, temp_bytes=100, n_temps=1), Budget(300, 3), 0, set(), RoomPlan()),
        # too many bytes: the least recently used goes at once, for the trash counts too
        (_survey(B, C, A, temp_bytes=100, n_temps=1), Budget(300, 9), 0, set(), RoomPlan(delete=("a",))),
        # too many files, enough bytes: the trash's grace can be kept
        (_survey(A, B, C, temp_bytes=100, n_temps=1), Budget(900, 3), 0, set(), RoomPlan(to_trash=("a",))),
        # trash first, oldest first, no more of it than needed
        (_survey(A, B, trash=(NEW, OLD), temp_bytes=50, n_temps=1), Budget(300, 9), 0, set(), RoomPlan(purge=("old",))),
        # what is being read stays; the next one goes
        (_survey(A, B, C, temp_bytes=100, n_temps=1), Budget(300, 9), 0, {"a"}, RoomPlan(delete=("b",))),
        # the disk lacks bytes although the budget does not
        (_survey(A, B, C), Budget(10_000, 9), 150, set(), RoomPlan(delete=("a", "b"))),
        # cannot be done: then nothing goes
        (_survey(A, temp_bytes=200, n_temps=1), Budget(200, 9), 0, {"a"}, None),
        (_survey(A, temp_bytes=300, n_temps=1), Budget(200, 9), 0, set(), None),
        (_survey(A, n_temps=1), Budget(900, 1), 0, {"a"}, None),
        (_survey(), Budget(900, 9), 1, set(), None),
    ],
)
def test_plans(survey: Survey, budget: Budget, shortage_bytes: int, protected: set[str], plan: RoomPlan | None) -> None:
    assert plan_room(survey, budget, shortage_bytes, protected, 0) == plan


def test_expired_trash_goes_although_nothing_calls_for_it() -> None:
    assert plan_room(_survey(A, trash=(NEW, OLD)), Budget(900, 9), 0, set(), 2) == RoomPlan(purge=("old",))


entries = st.builds(Entry, st.uuids().map(str), st.integers(0, 100), st.integers(0, 20))


@given(
    st.lists(entries, max_size=12),
    st.lists(entries, max_size=6),
    st.integers(0, 200),
    st.integers(0, 2),
    st.integers(0, 500),
    st.integers(0, 10),
    st.integers(0, 100),
    st.data(),
)
def test_a_plan_keeps_the_budget_and_spares_the_recent_and_the_pinned(
    snapshots: list[Entry],
    trash: list[Entry],
    temp_bytes: int,
    n_temps: int,
    max_bytes: int,
    max_files: int,
    shortage_bytes: int,
    data: st.DataObject,
) -> None:
    protected = {entry.name for entry in snapshots if data.draw(st.booleans())}
    survey = Survey(tuple(snapshots), tuple(trash), temp_bytes, n_temps)
    plan = plan_room(survey, Budget(max_bytes, max_files), shortage_bytes, protected, 0)
    pinned_bytes = sum(entry.n_bytes for entry in snapshots if entry.name in protected)
    free_by_all = sum(entry.n_bytes for entry in (*snapshots, *trash)) - pinned_bytes
    if plan is None:
        assert (
            pinned_bytes + temp_bytes > max_bytes
            or len(protected) + n_temps > max_files
            or free_by_all < shortage_bytes
        )
        return
    gone = {*plan.purge, *plan.evict}
    assert not gone & protected
    freed = sum(e.n_bytes for e in snapshots if e.name in plan.delete) + sum(
        e.n_bytes for e in trash if e.name in plan.purge
    )
    assert survey.n_bytes - freed <= max_bytes or freed == survey.n_bytes
    assert freed >= shortage_bytes
    assert len(snapshots) - len(plan.evict) + n_temps <= max_files
    evicted_at = max((e.at_ns for e in snapshots if e.name in plan.evict), default=-1)
    assert all(e.at_ns >= evicted_at for e in snapshots if e.name not in plan.evict and e.name not in protected)
    if plan.delete:
        assert set(plan.purge) == {entry.name for entry in trash}
