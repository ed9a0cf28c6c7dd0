"""Which node answers, and what each node is told about it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.coordinator.backlog import Ahead
from kvferry.coordinator.membership import Load, Member, Node, NodeState
from kvferry.coordinator.prediction import Coming, Forecast
from kvferry.coordinator.rates import Rates
from kvferry.coordinator.routing import MAX_CANDIDATES_KEPT, Candidate, Choice, RouteRequest, View, route

BYTES_PER_ROW = 46_080  # of smollm2-135m: 30 layers, 3 heads of 64, float32 K and V
FAST = Rates(
    prefill_per_token=0.001, prefill_per_pair=0.0, restore_latency=0.01, restore_per_byte=1e-9, decode_drag=1.0
)
SLOW = dataclasses.replace(FAST, prefill_per_token=0.002)


def member(
    node_id: str, *, resident: int = 0, running: int = 0, queued: int = 0, state: NodeState = NodeState.LIVE,
    fingerprint: str = "fp", context: int = 4096, store_ok: bool = True,
) -> Member:  # fmt: skip
    node = Node(
        node_id=node_id, boot_id="b", address="h:1", model="m", fingerprint=fingerprint, context_length=context,
        load=Load(n_running=running, n_queued=queued, store_ok=store_ok), resident={"s": resident} if resident else {},
        max_running=4, bytes_per_row=BYTES_PER_ROW,
    )  # fmt: skip
    return Member(node=node, state=state, silent_seconds=1.6)


def choose(
    *members: Member, stored: int = 0, turns: dict[str, int] | None = None, shared: dict[str, int] | None = None,
    coming: dict[str, Coming] | None = None, forecasts: dict[str, Forecast] | None = None, **request: object,
) -> Choice:  # fmt: skip
    wanted = {"session_id": "s", "n_tokens": 640, "n_context": 1000, **request}
    usual = {m.node.node_id: Forecast(rates=FAST) for m in members}
    view = View(
        members=members, n_turns=turns or {}, n_stored={"fp": stored} if stored else {}, n_shared=shared or {},
        coming=coming or {}, forecasts={**usual, **(forecasts or {})},
    )  # fmt: skip
    return route(view, RouteRequest(**wanted))


def chosen(choice: Choice) -> str | None:
    assert [c.node_id for c in choice.candidates if c.chosen] == ([choice.member.node.node_id] if choice.member else [])
    return choice.member.node.node_id if choice.member else None


def reasons(choice: Choice) -> dict[str, str]:
    return {c.node_id: c.reason for c in choice.candidates}


def of(choice: Choice, node_id: str) -> Candidate:
    return next(c for c in choice.candidates if c.node_id == node_id)


def test_the_node_that_has_least_to_compute_is_soonest_while_nobody_is_busy() -> None:
    choice = choose(member("a", resident=100), member("b", resident=612), member("c"))
    assert reasons(choice) == {
        "a": "passed over: first token in 540 ms, prefill 540 ms against 28 ms",
        "b": "chosen: first token in 28 ms, 612 of 640 tokens in memory",
        "c": "passed over: first token in 640 ms, prefill 640 ms against 28 ms",
    }


def test_a_prompt_that_a_node_is_computing_is_not_computed_by_another_one_as_well() -> None:
    busy = {"b": Forecast(rates=FAST, ahead=Ahead(prefilling_s=(0.3,)))}
    choice = choose(member("a"), member("b"), coming={"b": Coming(600, 0.3)}, forecasts=busy, turns={"b": 1})
    assert chosen(choice) == "b"
    assert (
        reasons(choice)["b"] == "chosen: first token in 340 ms, 600 of 640 tokens with another turn that computes them"
    )
    assert of(choice, "b").n_computed == 40
    # The store has them sooner, or nobody has to wait.
    assert chosen(choose(member("a"), member("b"), coming={"b": Coming(600, 0.9)}, forecasts=busy, stored=600)) == "a"


def test_a_shorter_prefix_on_an_idle_node_beats_a_longer_one_behind_a_long_queue() -> None:
    busy = {"b": Forecast(rates=FAST, ahead=Ahead(prefilling_s=(3.0, 5.0))), "a": Forecast(rates=FAST)}
    assert chosen(choose(member("a", resident=300), member("b", resident=612, running=2), forecasts=busy)) == "b"
    # 28 ms of its own work share the engine with two others for three times as long: still soon. A full batch is not.
    full = {"b": Forecast(rates=FAST, turn_s=10.0)}
    choice = choose(member("a", resident=500), member("b", resident=612, running=4), forecasts=full)
    assert chosen(choice) == "a"
    assert reasons(choice)["b"] == "passed over: first token in 2.5 s, queue 2.5 s against 0 ms"


def test_the_others_wait_counts_as_much_as_its_own() -> None:
    """On a the token would come sooner, on b nobody else pays for it."""
    shares = {"a": Forecast(rates=FAST, ahead=Ahead(prefilling_s=(0.3, 0.3))), "b": Forecast(rates=SLOW)}
    choice = choose(member("a", running=2), member("b"), forecasts=shares)
    assert of(choice, "a").predicted_seconds < of(choice, "b").predicted_seconds
    assert chosen(choice) == "b"
    assert of(choice, "a").others_seconds == pytest.approx(0.6)
    assert reasons(choice)["a"] == (
        "passed over: first token in 1.2 s, but 600 ms later for the turns that wait there against 0 ms"
    )


def test_a_prompt_gets_on_slower_beside_decodes_and_an_idle_node_wins_though_it_has_less() -> None:
    paced = Forecast(rates=dataclasses.replace(FAST, decode_drag=2.0))
    choice = choose(member("a", resident=300, running=1), member("b", resident=100), forecasts={"a": paced})
    assert chosen(choice) == "b"
    assert reasons(choice)["a"] == "passed over: first token in 680 ms, prefill 680 ms against 540 ms"


def test_a_picture_is_looked_at_unless_its_rows_are_there() -> None:
    sees = dataclasses.replace(FAST, look_per_token=0.01)
    members = [
        dataclasses.replace(m, node=dataclasses.replace(m.node, sees_images=True))
        for m in (member("a", resident=30), member("b", resident=20))
    ]
    forecasts = {name: Forecast(rates=sees) for name in "ab"}
    choice = choose(*members, forecasts=forecasts, images=((10, 26),))
    assert of(choice, "a").look_seconds == 0.0
    assert of(choice, "b").look_seconds == pytest.approx(0.16)
    assert reasons(choice)["b"] == "passed over: first token in 780 ms, look 160 ms against 0 ms"
    behind = choose(members[1], forecasts={"b": Forecast(rates=sees, ahead=Ahead(looking_s=3.0))}, images=((10, 26),))
    assert of(behind, "b").queue_seconds == pytest.approx(3.0)


def test_a_faster_board_wins_when_both_have_to_compute() -> None:
    choice = choose(member("a"), member("b"), forecasts={"a": Forecast(rates=SLOW)})
    assert chosen(choice) == "b"
    assert reasons(choice)["a"] == "passed over: first token in 1.3 s, prefill 1.3 s against 640 ms"


def test_rows_come_from_the_store_where_that_is_sooner() -> None:
    choice = choose(member("a", resident=100), member("b", store_ok=False), stored=500)
    assert reasons(choice)["a"] == "chosen: first token in 173 ms, 500 of 640 tokens from the store"
    parts = of(choice, "a")
    assert (parts.n_restored, parts.n_computed) == (500, 140)
    assert parts.restore_seconds == pytest.approx(0.01 + 500 * BYTES_PER_ROW * 1e-9)
    assert parts.prefill_seconds == pytest.approx(0.14)
    assert parts.predicted_seconds == pytest.approx(parts.queue_seconds + parts.restore_seconds + parts.prefill_seconds)
    assert of(choice, "b").n_stored == 0


def test_rows_are_computed_where_the_store_is_slower_than_that() -> None:
    slow_disk = {"a": Forecast(rates=dataclasses.replace(FAST, restore_per_byte=1e-7))}
    choice = choose(member("a", resident=100), stored=500, forecasts=slow_disk)
    assert choice.prediction is not None
    assert choice.prediction.recompute
    assert (of(choice, "a").n_restored, of(choice, "a").n_computed) == (0, 540)
    assert reasons(choice)["a"].endswith("100 of 640 tokens in memory, sooner than reading them from the store")
    waiting = {"a": Forecast(rates=FAST, ahead=Ahead(reading_s=2.0))}  # a good disk that others read from
    behind = choose(member("a", resident=100), stored=500, forecasts=waiting)
    assert behind.prediction is not None
    assert behind.prediction.recompute


def test_rows_of_other_sessions_in_memory_count_as_well() -> None:
    choice = choose(member("a"), member("b"), shared={"b": 400})
    assert chosen(choice) == "b"
    assert of(choice, "b").n_resident == 400


def test_without_any_difference_the_least_loaded_node_wins_and_then_the_first_by_name() -> None:
    assert chosen(choose(member("a", running=1, queued=1), member("b", running=1), member("c", running=1))) == "b"
    assert reasons(choose(member("a"), member("b")))["b"] == "passed over: as good as a, which comes first by name"
    assert reasons(choose(member("a"), member("b", running=1)))["b"] == (
        "passed over: as soon, but busier, 1 turn against 0"
    )


def test_turns_placed_since_the_last_heartbeat_count_as_load() -> None:
    assert chosen(choose(member("a"), member("b", running=1), turns={"a": 2})) == "b"


def test_no_prediction_lets_a_node_queue_more_than_two_turns_beyond_another() -> None:
    patient = {"a": Forecast(rates=FAST, turn_s=0.001)}  # a full batch that costs nothing, or so it seems
    assert chosen(choose(member("a", resident=639, running=4, queued=2), member("b"), forecasts=patient)) == "a"
    choice = choose(member("a", resident=639, running=4, queued=3), member("b"), forecasts=patient)
    assert chosen(choice) == "b"
    assert reasons(choice)["a"] == "passed over: 3 turns in its queue, and 0 in another one's"


def test_among_thousands_the_one_that_computes_the_prompt_is_found() -> None:
    busy = {"n1999": Forecast(rates=FAST, ahead=Ahead(prefilling_s=(0.1,)))}
    fleet = [member(f"n{i:04}") for i in range(2_000)]
    choice = choose(*fleet, coming={"n1999": Coming(600, 0.1)}, forecasts=busy, turns={"n1999": 1})
    assert chosen(choice) == "n1999"


def test_a_large_fleet_shows_the_nearest_candidates_only() -> None:
    choice = choose(*(member(f"n{i:04}", resident=i % 600) for i in range(2_000)))
    assert (choice.n_candidates, len(choice.candidates)) == (2_000, MAX_CANDIDATES_KEPT)
    assert chosen(choice) == "n0599"
    assert all(c.n_resident > 580 for c in choice.candidates)


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
        cheapest = min(
            (
                c.predicted_seconds + c.others_seconds
                for c in choice.candidates
                if not c.reason.startswith(("cannot", "passed over: it"))
            ),
            default=0.0,
        )
        assert choice.prediction is not None
        assert choice.prediction.cost_seconds <= cheapest
        if any(m.node.node_id not in failed for m in able):
            assert choice.member.node.node_id not in failed
    again = choose(*reversed(members), stored=stored, failed=failed, fingerprint=fingerprint)
    assert chosen(again) == chosen(choice)  # the order in which nodes are known decides nothing
