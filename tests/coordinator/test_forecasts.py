"""What the router learns from placements: the next prediction, whose memory shares a prefix, how right it was."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.coordinator.forecasts import Forecasts
from kvferry.coordinator.membership import Node
from kvferry.coordinator.prediction import Coming, Prediction
from kvferry.proto.v1 import common_pb2


def node(node_id: str = "a", boot_id: str = "boot1", **fields: object) -> Node:
    return Node(
        node_id=node_id, boot_id=boot_id, address="h:1", model="m", fingerprint="fp", context_length=4096,
        bytes_per_row=1_000, **fields,
    )  # fmt: skip


def predicted(prefill_s: float, restore_s: float = 0.0) -> Prediction:
    return Prediction(
        queue_seconds=0.0, restore_seconds=restore_s, prefill_seconds=prefill_s, work_seconds=prefill_s, n_restored=0,
        n_computed=1, recompute=False,
    )  # fmt: skip


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, dtype=np.int32)


def test_a_turn_without_a_token_so_far_is_in_the_way_of_the_next_one() -> None:
    forecasts = Forecasts()
    assert forecasts.of({"a": node()}, 0.0)["a"].ahead.prefilling_s == ()
    awaiting = forecasts.placed(node(), predicted(4.0, restore_s=2.0), 0, 0.0)
    assert forecasts.of({"a": node()}, 1.0)["a"].ahead.reading_s == 1.0
    assert forecasts.of({"a": node()}, 1.0)["a"].ahead.prefilling_s == (4.0,)
    forecasts.first_token(awaiting, 5.0)
    assert forecasts.of({"a": node()}, 5.0)["a"].ahead.prefilling_s == ()


def test_a_new_boot_has_no_work_and_no_memory_but_is_the_same_board() -> None:
    forecasts = Forecasts()
    awaiting = forecasts.placed(node(), predicted(4.0), 0, 0.0)
    report = common_pb2.PrefixReport(n_tokens=1_000, n_computed=1_000, prefill_seconds=40.0)
    forecasts.reported(awaiting, report, 40.0)
    forecasts.remembers(node(), "s", ids(1, 2, 3))
    learned = forecasts.of({"a": node()}, 40.0)["a"].rates
    assert learned.prefill_seconds(0, 1_000) == pytest.approx(40.0, rel=0.2)
    again = node(boot_id="boot2")
    assert forecasts.of({"a": again}, 40.0)["a"].ahead.prefilling_s == ()
    assert forecasts.of({"a": again}, 40.0)["a"].rates == learned
    assert forecasts.shared([again], ids(1, 2, 3, 4)) == {}


def test_a_turn_that_is_late_is_expected_to_be_as_late_again() -> None:
    forecasts = Forecasts()
    forecasts.placed(node(), predicted(4.0), 0, 0.0)
    seen = [forecasts.of({"a": node()}, now_s)["a"].ahead.prefilling_s for now_s in (3.0, 4.0, 4.5, 7.0)]
    assert seen == [(1.0,), (0.0,), (0.5,), (3.0,)]


def test_rows_that_a_turn_is_computing_are_known_until_it_has_its_first_token() -> None:
    forecasts = Forecasts()
    prompt = np.arange(100, dtype=np.int32)
    awaiting = forecasts.placed(node(), predicted(4.0), 0, 0.0, prompt)
    same_beginning = np.append(prompt[:80], ids(7, 8, 9))
    assert forecasts.coming([node(), node("b")], same_beginning, 1.0) == {"a": Coming(80, 3.0)}
    assert forecasts.coming([node()], prompt[50:], 1.0) == {}
    assert forecasts.coming([node()], prompt[:20], 1.0) == {}, "too few to wait for"
    assert forecasts.coming([node(boot_id="boot2")], same_beginning, 1.0) == {}
    forecasts.first_token(awaiting, 5.0)
    assert forecasts.coming([node()], same_beginning, 5.0) == {}


def test_rows_of_a_turn_that_was_given_up_do_not_come() -> None:
    forecasts = Forecasts()
    prompt = np.arange(100, dtype=np.int32)
    forecasts.over(forecasts.placed(node(), predicted(4.0), 0, 0.0, prompt), 1.0)
    assert forecasts.coming([node()], prompt, 1.0) == {}


def test_memory_is_what_was_seen_there_and_the_heartbeat_did_not_deny() -> None:
    forecasts = Forecasts()
    forecasts.remembers(node(), "s1", ids(1, 2, 3, 4))
    forecasts.remembers(node(), "s2", ids(1, 2, 9))
    forecasts.remembers(node("b"), "s3", ids(7))
    both = [node(resident={"s1": 4, "s2": 3}), node("b", resident={"s3": 1})]
    assert forecasts.shared(both, ids(1, 2, 3, 5)) == {"a": 3}
    assert forecasts.shared([node(resident={"s1": 2})], ids(1, 2, 3, 5)) == {"a": 2}  # it kept fewer rows
    forecasts.heard(node(), {"s2": 3})
    assert forecasts.shared(both, ids(1, 2, 3, 5)) == {"a": 2}


def test_predictions_are_scored_by_what_came() -> None:
    forecasts = Forecasts()
    assert forecasts.accuracy().n == 0
    for actual_s in (1.0, 2.0, 4.0):
        forecasts.first_token(forecasts.placed(node(), predicted(2.0), 0, 10.0), 10.0 + actual_s)
    forecasts.over(forecasts.placed(node(), predicted(9.0), 0, 50.0), 60.0)  # lost: nothing came, nothing to compare
    accuracy = forecasts.accuracy()
    assert (accuracy.n, accuracy.predicted_seconds, accuracy.actual_seconds) == (3, 2.0, 2.0)
    assert accuracy.error == pytest.approx(0.5)


def test_a_turn_that_decodes_there_drags_the_prompts_until_it_is_over() -> None:
    forecasts = Forecasts()
    first = forecasts.placed(node(), predicted(1.0), 0, 0.0)
    forecasts.first_token(first, 1.0)
    forecasts.placed(node(), predicted(8.0), 1, 1.0)
    drag = forecasts.of({"a": node()}, 1.0)["a"].rates.decode_drag
    assert forecasts.of({"a": node()}, 1.0 + drag)["a"].ahead.prefilling_s == (pytest.approx(7.0),)
    forecasts.over(first, 1.0 + drag)
    assert forecasts.of({"a": node()}, 2.0 + drag)["a"].ahead.prefilling_s == (pytest.approx(6.0),)


def test_the_way_there_is_foreseen_once_it_was_seen() -> None:
    forecasts = Forecasts()
    for _ in range(10):
        awaiting = forecasts.placed(node(), predicted(1.0), 0, 0.0)
        forecasts.reported(awaiting, common_pb2.PrefixReport(n_tokens=10, n_computed=10, prefill_seconds=1.0), 1.3)
        forecasts.first_token(awaiting, 1.3)
        forecasts.over(awaiting, 2.0)
    assert forecasts.of({"a": node()}, 9.0)["a"].rates.start_idle == pytest.approx(0.3, rel=0.1)


def test_turns_that_hold_their_slots_longer_make_a_full_batch_a_longer_wait() -> None:
    forecasts = Forecasts()
    before = forecasts.of({"a": node()}, 0.0)["a"].turn_s
    for _ in range(50):
        forecasts.turn_ended(60.0)
    assert before < 55.0 < forecasts.of({"a": node()}, 0.0)["a"].turn_s
