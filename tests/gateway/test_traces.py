"""Turns as pictures: times of one that is watched, and of one that was over before it was seen."""

from __future__ import annotations

import pytest

from kvferry.client import Finished, FinishReason, NodeLost, Placed, PrefixReport, Started, Token
from kvferry.gateway.dashboard.traces import Trace


def placed(node: str, first_index: int, prefill: float = 0.2) -> Placed:
    prefix = PrefixReport(10, 4, 0, 6, 0.1, 0.0, prefill, "", ())
    return Placed(node, 1, first_index, (), prefix, predicted_seconds=0.25)


def finished(total: float, pause: float = 0.0) -> Finished:
    return Finished(FinishReason.END, 10, 4, "", 0.3, total, pause, 2)


EVENTS = [
    (0, Started(10, 0)),
    (300, placed("a", 0)),
    (300, Token(0, 5, "x")),
    (400, Token(1, 6, "y")),
    (450, NodeLost("a", "broken_stream", "", 2)),
    (900, placed("b", 2, prefill=0.3)),
    (900, Token(2, 7, "z")),
    (1000, Token(3, 2, "")),
]


def test_a_turn_that_is_watched_has_the_times_at_which_its_events_came():
    trace = Trace("s", "t", 0)
    for now, event in EVENTS:
        trace.push(event, now)
    trace.push(finished(1.0, pause=0.5), 1000)
    first, second = trace.stays
    assert (first.placed_ms, first.first_token_ms, first.last_token_ms, first.lost) == (0, 300, 400, "broken_stream")
    assert (second.placed_ms, second.first_token_ms, second.n_tokens, second.lost) == (500, 900, 2, "")
    assert (first.n_resident, first.n_computed, first.predicted_ms) == (4, 6, 250)
    assert (trace.ended_ms, trace.n_tokens, trace.longest_pause_ms, trace.reason) == (1000, 4, 500, "end")


def test_a_turn_seen_when_it_was_over_is_laid_out_backwards_from_its_end():
    trace = Trace("s", "t", 99_999)
    for _, event in EVENTS:
        if not isinstance(event, NodeLost):  # a record does not tell of it
            trace.push(event, 99_999)
    trace.push(end := finished(2.0, pause=0.5), 99_999)
    trace.lay_out(end, 50_000)
    first, second = trace.stays
    assert (trace.began_ms, trace.ended_ms) == (48_000, 50_000)
    assert first.placed_ms == 48_000
    assert first.first_token_ms == pytest.approx(48_300)
    assert first.lost == "moved"
    assert second.placed_ms == pytest.approx(first.last_token_ms + 500)
    assert second.last_token_ms == pytest.approx(50_000)
