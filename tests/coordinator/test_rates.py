"""A node's speed, learned from what its turns report: at any depth, soon, and not from spans that others shared."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.coordinator.backlog import Ahead, Backlog, prefill_ends, prefills_after
from kvferry.coordinator.rates import Foreseen, NodeRates, Rates, Report, Told, typical

BOARD = Rates(prefill_per_token=0.008, prefill_per_pair=2e-6, restore_latency=0.05, restore_per_byte=8e-9)
BYTES_PER_ROW = 229_380


def report(n_tokens: int, n_restored: int = 0, n_resident: int = 0, board: Rates = BOARD, **changes: object) -> Report:
    """What a node of exactly these rates says."""
    n_reused = n_restored + n_resident
    fields = {
        "n_tokens": n_tokens, "n_restored": n_restored, "n_computed": n_tokens - n_reused,
        "restore_seconds": board.restore_seconds(n_restored * BYTES_PER_ROW),
        "prefill_seconds": board.prefill_seconds(n_reused, n_tokens), "bytes_per_row": BYTES_PER_ROW,
        "prefilled_alone": True, "restored_alone": True, "beside_decodes": False,
    }  # fmt: skip
    return Report(**{**fields, **changes})


def learn(rates: NodeRates, *reports: Report, start_s: float = 0.0) -> Rates:
    for number, one in enumerate(reports):
        rates.learn(one, Told(), Rates(), start_s + number)
    return rates.now(Told(), Rates())


TURNS = [
    report(n, n_restored=r) for n, r in [(300, 0), (2_000, 1_500), (6_000, 100), (900, 800), (4_000, 0), (7_000, 5_000)]
]


def test_a_few_turns_teach_the_rate_at_every_depth() -> None:
    learned = learn(NodeRates(), *TURNS)
    for n_reused, n_tokens in [(0, 100), (0, 8_000), (4_000, 4_100), (7_900, 8_000)]:
        assert learned.prefill_seconds(n_reused, n_tokens) == pytest.approx(
            BOARD.prefill_seconds(n_reused, n_tokens), rel=0.15
        )
    for n_bytes in (5e7, 1e9):
        assert learned.restore_seconds(n_bytes) == pytest.approx(BOARD.restore_seconds(n_bytes), rel=0.15)


def test_one_turn_is_better_than_the_guess() -> None:
    learned = learn(NodeRates(), report(1_000))
    assert learned.prefill_seconds(0, 1_000) == pytest.approx(BOARD.prefill_seconds(0, 1_000), rel=0.15)


def test_a_board_that_throttles_is_believed_within_a_dozen_turns() -> None:
    hot = dataclasses.replace(BOARD, prefill_per_token=0.016, prefill_per_pair=4e-6)
    rates = NodeRates()
    learn(rates, *itertools.islice(itertools.cycle(TURNS), 50))
    again = [report(r.n_tokens, n_restored=r.n_restored, board=hot) for r in TURNS]
    learned = learn(rates, *again, *again, start_s=50.0)
    assert learned.prefill_seconds(0, 2_000) == pytest.approx(hot.prefill_seconds(0, 2_000), rel=0.2)
    cooled = learn(rates, report(2_000), start_s=50_000.0)  # after a night one turn outweighs them all
    assert cooled.prefill_seconds(0, 2_000) == pytest.approx(BOARD.prefill_seconds(0, 2_000), rel=0.2)


def test_spans_that_others_shared_teach_nothing() -> None:
    rates = NodeRates()
    before = learn(rates, *TURNS)
    shared = report(1_000, 500, prefilled_alone=False, restored_alone=False, prefill_seconds=99.0, restore_seconds=99.0)
    assert learn(rates, shared) == before


def test_decodes_beside_it_teach_how_much_they_drag() -> None:
    rates = NodeRates()
    learn(rates, *TURNS)
    slowed = report(1_000, prefill_seconds=2 * BOARD.prefill_seconds(0, 1_000), beside_decodes=True)
    learned = learn(rates, *[slowed] * 20)
    assert learned.decode_drag == pytest.approx(2.0, rel=0.2)
    assert learned.prefill_seconds(0, 1_000) == pytest.approx(BOARD.prefill_seconds(0, 1_000), rel=0.15)


def test_shared_spans_that_last_longer_than_foreseen_count_as_drag() -> None:
    rates = NodeRates()
    before = learn(rates, *TURNS)
    shared = {"prefilled_alone": False, "beside_decodes": True, "prefill_seconds": 30.0}
    learned = learn(rates, *[report(1_000, foreseen=Foreseen(10.0, 2.0), **shared)] * 20)
    assert learned.decode_drag == pytest.approx(6.0, rel=0.1)
    assert learned.prefill_per_token == before.prefill_per_token


def test_a_newcomer_is_taken_at_its_own_word_then_for_what_is_usual_here() -> None:
    usual = typical([BOARD, BOARD, Rates()])
    assert usual.prefill_per_token == BOARD.prefill_per_token
    assert NodeRates().now(Told(), usual).prefill_seconds(0, 500) == pytest.approx(BOARD.prefill_seconds(0, 500))
    told = NodeRates().now(Told(prefill_tokens=250.0, restore_bytes=5e8), usual)
    assert told.prefill_per_token == pytest.approx(1 / 250)
    assert told.restore_per_byte == pytest.approx(1 / 5e8)
    assert typical([]) == Rates()


def test_the_way_to_the_first_step_and_a_look_at_a_picture_are_learned_too() -> None:
    rates = NodeRates()
    for _ in range(8):
        rates.learn(report(100, n_looked=256, look_seconds=2.56), Told(), Rates(), 0.0)
        rates.learn_start(0.01, Rates(), beside_decodes=False)
        rates.learn_start(0.2, Rates(), beside_decodes=True)
    learned = rates.now(Told(), Rates())
    assert learned.look_per_token == pytest.approx(0.01)
    assert learned.start_idle == pytest.approx(0.01, rel=0.2)
    assert learned.start_beside_decodes == pytest.approx(0.2, rel=0.2)
    remembered = dataclasses.replace(report(100), n_looked=0, look_seconds=0.001)  # the node had seen it before
    assert learn(rates, remembered).look_per_token == learned.look_per_token


# Work that is waiting.


def test_reads_go_one_after_the_other_and_so_do_looks_and_prefills_side_by_side() -> None:
    backlog = Backlog()
    backlog.add(2.0, 0.5, 1.0, 0.0)
    backlog.add(3.0, 0.0, 4.0, 0.0)
    assert backlog.ahead(1.0) == Ahead(4.0, 0.5, (1.0, 4.0))
    assert backlog.ahead(2.0).reading_s == 3.0
    assert backlog.ahead(2.5) == Ahead(2.5, 0.0, (1.0, 4.0))
    assert backlog.ahead(3.0) == Ahead(2.0, 0.0, (0.5, 4.0))


def test_equal_shares_until_the_short_one_is_done() -> None:
    backlog = Backlog()
    backlog.add(0.0, 0.0, 1.0, 10.0)
    backlog.add(0.0, 0.0, 4.0, 10.0)
    assert backlog.ahead(11.0).prefilling_s == (0.5, 3.5)
    assert backlog.ahead(13.0).prefilling_s == (0.0, 2.0)
    assert backlog.ahead(15.0).prefilling_s == (1.0, 0.0)  # late, but not there yet


def test_prompts_get_on_slower_while_a_turn_decodes() -> None:
    backlog = Backlog()
    backlog.drag = 2.0
    first = backlog.add(0.0, 0.0, 1.0, 0.0)
    backlog.begins_to_decode(first, 1.0)
    backlog.add(0.0, 0.0, 4.0, 1.0)
    assert backlog.ahead(3.0).prefilling_s == (3.0,)
    backlog.remove(first, 3.0)
    assert backlog.ahead(5.0).prefilling_s == (1.0,)


def test_what_has_its_first_token_is_no_prefill_any_more() -> None:
    backlog = Backlog()
    first, second = backlog.add(0.0, 0.0, 1.0, 0.0), backlog.add(0.0, 0.0, 4.0, 0.0)
    assert not first.prefilled_alone
    assert not second.prefilled_alone
    backlog.begins_to_decode(first, 1.0)
    assert (len(backlog), backlog.ahead(1.0).prefilling_s) == (1, (3.5,))
    backlog.remove(first, 1.0)
    backlog.remove(first, 1.0)
    assert (len(backlog), backlog.ahead(1.0).prefilling_s) == (1, (3.5,))
    backlog.remove(second, 2.0)
    assert backlog.add(1.0, 0.0, 1.0, 3.0).prefilled_alone


def test_a_short_prefill_waits_for_no_more_of_a_long_one_than_its_own_length() -> None:
    assert prefill_ends((10.0, 0.25, 0.5), 1.0, beside_decodes=False)[2] == 0.5 + 0.75
    assert prefill_ends((), 1.0, beside_decodes=False) == []


def test_a_prefill_that_ends_drags_those_that_go_on() -> None:
    assert prefill_ends((1.0, 2.0), 3.0, beside_decodes=False) == [2.0, 2.0 + 3.0]
    assert prefill_ends((1.0, 2.0), 3.0, beside_decodes=True) == [6.0, 9.0]


@given(st.lists(st.floats(0.01, 9.0), min_size=1, max_size=6), st.floats(1.0, 4.0), st.booleans(), st.floats(0.0, 40.0))
@example(prefills_s=[1.4426950408889634, 8.618118565128189], drag=2.5, beside_decodes=False, seconds=21.0)
def test_what_is_left_ends_when_it_was_foreseen(
    prefills_s: list[float], drag: float, beside_decodes: bool, seconds: float
) -> None:
    ends = prefill_ends(prefills_s, drag, beside_decodes=beside_decodes)
    left = prefills_after(seconds, prefills_s, drag, beside_decodes=beside_decodes)
    one_ended = beside_decodes or min(ends) <= seconds
    later = prefill_ends([left_s for left_s in left if left_s > 0], drag, beside_decodes=one_ended)
    still = [end for end, left_s in zip(ends, left, strict=True) if left_s > 0]
    assert [seconds + end for end in later] == pytest.approx(still, abs=1e-6)
