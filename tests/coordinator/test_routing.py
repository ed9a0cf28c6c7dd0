"""Which node answers, and what each node is told about it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.coordinator.membership import Load, Member, Node, NodeState
from kvferry.coordinator.routing import Choice, RouteRequest, View, route


def member(
    node_id: str, *, resident: int = 0, running: int = 0, queued: int = 0, state: NodeState = NodeState.LIVE,
    fingerprint: str = "fp", context: int = 4096, store_ok: bool = True,
) -> Member:  # fmt: skip
    node = Node(
        node_id=node_id, boot_id="b", address="h:1", model="m", fingerprint=fingerprint, context_length=context,
        load=Load(n_running=running, n_queued=queued, store_ok=store_ok), resident={"s": resident} if resident else {},
    )  # fmt: skip
    return Member(node=node, state=state, silent_seconds=1.6)


def choose(*members: Member, stored: int = 0, placed: dict[str, int] | None = None, **request: object) -> Choice:
    wanted = {"session_id": "s", "n_tokens": 640, "n_context": 1000, **request}
    view = View(members=members, n_placed=placed or {}, n_stored={"fp": stored} if stored else {})
    return route(view, RouteRequest(**wanted))


def chosen(choice: Choice) -> str | None:
    assert [c.node_id for c in choice.candidates if c.chosen] == ([choice.member.node.node_id] if choice.member else [])
    return choice.member.node.node_id if choice.member else None


def reasons(choice: Choice) -> dict[str, str]:
    return {c.node_id: c.reason for c in choice.candidates}


def test_the_longest_prefix_in_memory_wins_over_load() -> None:
    choice = choose(member("a", resident=100), member("b", resident=612, running=5), member("c"))
    assert reasons(choice) == {
        "a": "passed over: 100 useful tokens in memory against 612",
        "b": "chosen: holds 612 of 640 tokens in memory",
        "c": "passed over: 0 useful tokens in memory against 612",
    }


def test_memory_that_holds_no_more_than_the_store_does_not_count() -> None:
    choice = choose(member("a", resident=100, running=3), member("b"), stored=500)
    assert reasons(choice) == {
        "a": "passed over: busier, 3 turns against 0",
        "b": "chosen: can restore 500 of 640 tokens from the store, 0 turns running or queued",
    }


def test_a_node_that_can_restore_wins_over_one_whose_store_is_down() -> None:
    choice = choose(member("a", store_ok=False), member("b", running=2), stored=500)
    assert chosen(choice) == "b"
    assert reasons(choice)["a"] == "passed over: could restore 0 tokens against 500"


def test_without_any_prefix_the_least_loaded_node_wins_and_then_the_first_by_name() -> None:
    assert chosen(choose(member("a", running=1, queued=1), member("b", running=1), member("c", running=1))) == "b"
    assert reasons(choose(member("a"), member("b")))["b"] == "passed over: as good as a, which comes first by name"


def test_turns_placed_since_the_last_heartbeat_count_as_load() -> None:
    assert chosen(choose(member("a"), member("b", running=1), placed={"a": 2})) == "b"


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ({"state": NodeState.DEAD}, "cannot take it: dead, nothing heard for 1.6 s"),
        ({"state": NodeState.SUSPECT}, "cannot take it: suspect, nothing heard for 1.6 s or a connection broke"),
        ({"state": NodeState.DRAINING}, "cannot take it: draining"),
        ({"fingerprint": "other"}, "cannot take it: the turn began under another fingerprint"),
        ({"context": 999}, "cannot take it: its context holds 999 tokens and this turn may need 1000"),
    ],
)
def test_a_node_that_cannot_take_the_turn_is_told_why(obstacle: dict[str, object], reason: str) -> None:
    choice = choose(member("a", resident=600, **obstacle), member("b", running=9), fingerprint="fp")
    assert chosen(choice) == "b"
    assert reasons(choice)["a"] == reason
    alone = choose(member("a", resident=600, **obstacle), fingerprint="fp")
    assert chosen(alone) is None
    assert alone.summary == f"a: {reason}"


def test_with_no_node_at_all_the_summary_says_so() -> None:
    assert choose().summary == "no node has registered"


def test_a_node_that_failed_this_turn_is_passed_over_while_another_lives() -> None:
    choice = choose(member("a", resident=600), member("b", running=9), failed={"a": "broken_stream"})
    assert chosen(choice) == "b"
    assert reasons(choice)["a"] == "passed over: it failed this turn (broken_stream)"


def test_when_all_have_failed_it_is_not_the_one_that_failed_last() -> None:
    members = (member("a", resident=600), member("b"))
    assert chosen(choose(*members, failed={"b": "refused", "a": "refused"})) == "b"
    assert chosen(choose(*members, failed={"a": "refused", "b": "refused"})) == "a"
    assert chosen(choose(members[0], failed={"a": "refused"})) == "a"


def test_the_last_token_is_always_computed() -> None:
    choice = choose(member("a", resident=640))
    assert choice.candidates[0].n_resident == 639


MEMBERS = st.builds(
    member,
    st.sampled_from("abcdef"),
    resident=st.integers(0, 700),
    running=st.integers(0, 4),
    state=st.sampled_from(NodeState),
    fingerprint=st.sampled_from(["fp", "other"]),
    context=st.sampled_from([512, 4096]),
    store_ok=st.booleans(),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(MEMBERS, max_size=6, unique_by=lambda m: m.node.node_id),
    st.integers(0, 700),
    st.dictionaries(st.sampled_from("abcdef"), st.just("refused")),
    st.sampled_from(["", "fp"]),
)
def test_any_choice_is_able_best_and_explained(
    members: list[Member], stored: int, failed: dict[str, str], fingerprint: str
) -> None:
    choice = choose(*members, stored=stored, failed=failed, fingerprint=fingerprint)
    able = [
        m for m in members
        if m.state is NodeState.LIVE and m.node.context_length >= 1000 and fingerprint in ("", m.node.fingerprint)
    ]  # fmt: skip
    assert (choice.member is None) == (not able)
    assert len(choice.candidates) == len(members)
    assert all(c.reason.startswith("chosen: ") == c.chosen for c in choice.candidates)
    if choice.member is not None:
        assert choice.member in able
        if any(m.node.node_id not in failed for m in able):
            assert choice.member.node.node_id not in failed
    again = choose(*reversed(members), stored=stored, failed=failed, fingerprint=fingerprint)
    assert chosen(again) == chosen(choice)  # the order in which nodes are known decides nothing
