"""The judge must find every fault that a test plants, name its place, and find none where there is none."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drills.judge import AnswerRecord, Fault, ReceivedToken, judge


def answer(*token_ids: int) -> AnswerRecord:
    received = tuple(ReceivedToken(index, token_id, f"<{token_id}>") for index, token_id in enumerate(token_ids))
    return AnswerRecord(received, "", "length")


def received(record: AnswerRecord, tokens: list[ReceivedToken]) -> AnswerRecord:
    return dataclasses.replace(record, received=tuple(tokens))


CONTROL = [answer(5, 6, 7), answer(8, 9, 10, 11)]

one_answer = st.lists(st.integers(0, 49151), min_size=2, max_size=20).map(lambda ids: answer(*ids))
answers = st.lists(one_answer, min_size=1, max_size=3)


def test_the_same_conversation_is_good():
    verdict = judge(CONTROL, CONTROL, [1, 2], [1, 2])
    assert verdict.is_good
    assert (verdict.n_turns, verdict.n_tokens_compared) == (2, 7)


def test_comparing_nothing_is_not_good():
    assert not judge([], []).is_good


@given(answers, st.data())
def test_a_lost_token_is_found(control, data):
    turn = data.draw(st.integers(0, len(control) - 1))
    index = data.draw(st.integers(0, len(control[turn].received) - 1))
    tokens = list(control[turn].received)
    del tokens[index]
    disturbed = [*control[:turn], received(control[turn], tokens), *control[turn + 1 :]]
    verdict = judge(disturbed, control)
    assert [(f.turn, f.fault, f.index) for f in verdict.findings] == [(turn + 1, Fault.LOST, index)]
    assert not verdict.is_good


@given(answers, st.data())
def test_a_duplicated_token_is_found(control, data):
    turn = data.draw(st.integers(0, len(control) - 1))
    index = data.draw(st.integers(0, len(control[turn].received) - 1))
    tokens = list(control[turn].received)
    tokens.insert(index, tokens[index])
    disturbed = [*control[:turn], received(control[turn], tokens), *control[turn + 1 :]]
    verdict = judge(disturbed, control)
    assert [(f.turn, f.fault, f.index) for f in verdict.findings] == [(turn + 1, Fault.DUPLICATED, index)]


@given(answers, st.data())
def test_a_differing_token_is_found(control, data):
    turn = data.draw(st.integers(0, len(control) - 1))
    index = data.draw(st.integers(0, len(control[turn].received) - 1))
    tokens = list(control[turn].received)
    tokens[index] = dataclasses.replace(tokens[index], token_id=tokens[index].token_id + 1)
    disturbed = [*control[:turn], received(control[turn], tokens), *control[turn + 1 :]]
    verdict = judge(disturbed, control)
    assert [(f.turn, f.fault, f.index) for f in verdict.findings] == [(turn + 1, Fault.DIFFERING, index)]


@given(answers, st.data())
def test_swapped_tokens_are_found(control, data):
    index = data.draw(st.integers(0, len(control[0].received) - 2))
    tokens = list(control[0].received)
    tokens[index], tokens[index + 1] = tokens[index + 1], tokens[index]
    verdict = judge([received(control[0], tokens), *control[1:]], control)
    assert [f.fault for f in verdict.findings] == [Fault.REORDERED]


def test_an_answer_that_went_on_too_long_differs():
    verdict = judge([answer(5, 6, 7, 8)], [answer(5, 6, 7)])
    assert [(f.fault, f.index) for f in verdict.findings] == [(Fault.DIFFERING, 3)]


def test_equal_tokens_with_another_text_differ():
    tokens = [dataclasses.replace(CONTROL[0].received[0], text="?"), *CONTROL[0].received[1:]]
    verdict = judge([received(CONTROL[0], tokens), CONTROL[1]], CONTROL)
    assert [(f.turn, f.fault, f.index) for f in verdict.findings] == [(1, Fault.DIFFERING, None)]


def test_text_may_be_cut_into_tokens_differently():
    first, second, *rest = CONTROL[0].received
    tokens = [dataclasses.replace(first, text=""), dataclasses.replace(second, text=first.text + second.text), *rest]
    assert judge([received(CONTROL[0], tokens), CONTROL[1]], CONTROL).is_good


@pytest.mark.parametrize("reason", ["end", ""])
def test_another_ending_differs(reason):
    verdict = judge([dataclasses.replace(CONTROL[0], finish_reason=reason)], CONTROL[:1])
    assert [f.fault for f in verdict.findings] == [Fault.DIFFERING]


def test_a_turn_that_never_took_place_is_lost():
    assert judge(CONTROL[:1], CONTROL).count(Fault.LOST) == 1


def test_stored_sessions_that_differ_are_found():
    verdict = judge(CONTROL, CONTROL, [1, 2, 3], [1, 2, 4])
    assert [(f.fault, f.index) for f in verdict.findings] == [(Fault.DIFFERING, 2)]


def test_a_faulty_control_is_not_trusted():
    faulty = received(CONTROL[0], [CONTROL[0].received[0]] * 2)
    assert not judge([faulty], [faulty]).is_good
