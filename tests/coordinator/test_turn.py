"""A turn, whatever nodes do: the answer grows by the next token only, and every reader gets every token once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.coordinator.registry import FinishReason, Message, TurnOutcome, TurnRecord
from kvferry.coordinator.turn import TRANSITIONS, Blame, Loss, Phase, Turn, TurnPolicy
from kvferry.coordinator.turn_events import replay
from kvferry.engine.text.detokenizer import Detokenizer
from kvferry.engine.text.stop import StopWatcher
from kvferry.proto.v1 import chat_pb2, common_pb2

END = 256
NOW = 0.0  # where the time decides nothing
DEAD = Loss(cause="broken_stream", detail="UNAVAILABLE: gone", blame=Blame.TURN)
DRAINING = Loss(cause="draining", detail="draining: bye", blame=Blame.NODE)
FULL = Loss(cause="refused", detail="queue_full: full", blame=Blame.CAPACITY, code="queue_full")


class ByteText:
    """Each of 256 tokens is a byte; one more ends the answer."""

    vocab_size = 257
    end_token_ids = (END,)

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._detokenizer, self._watcher = Detokenizer(self), StopWatcher(stops)

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == END else bytes([token_id])

    def push(self, token_id: int) -> tuple[str, bool]:
        return self._watcher.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        return self._watcher.push(self._detokenizer.flush())[0] + self._watcher.flush()


def record(**changes: object) -> TurnRecord:
    fields = {
        "session_id": "s", "turn_id": "t", "messages": (Message("user", "hi"),), "n_history_tokens": 2,
        "prompt_ids": np.array([1, 2, 3], np.int32), "sampling": b"", "max_tokens": 100, "stop": (), "digest": "d",
        "created_at_ms": 0,
    }  # fmt: skip
    return TurnRecord(**{**fields, **changes})


USUAL = TurnPolicy()


def new_turn(*, policy: TurnPolicy = USUAL, resumed: bool = False, **changes: object) -> Turn:
    made = record(**changes)
    return Turn(made, ByteText(made.stop), policy, 0.0, resumed=resumed)


def token(index: int, token_id: int | str) -> common_pb2.GeneratedToken:
    return common_pb2.GeneratedToken(index=index, token_id=ord(token_id) if isinstance(token_id, str) else token_id)


def tokens(text: str, start: int = 0) -> list[common_pb2.GeneratedToken]:
    return [token(start + i, byte) for i, byte in enumerate(text.encode())]


def kinds(events: list[chat_pb2.TurnEvent]) -> list[str]:
    return [str(e.WhichOneof("event")) for e in events]


def text_of(events: list[chat_pb2.TurnEvent]) -> str:
    return "".join(e.token.text if e.HasField("token") else e.finished.tail_text for e in events)


def finish(turn: Turn) -> chat_pb2.TurnFinished:
    turn.close()
    return turn.events[-1].finished


# An undisturbed turn.


def test_events_come_in_order_with_their_sequence_numbers() -> None:
    turn = new_turn(max_tokens=3)
    turn.place("a", "fp", 1, [chat_pb2.CandidateNode(node_id="a", chosen=True, reason="chosen")], NOW)
    turn.report_prefix(1, common_pb2.PrefixReport(n_tokens=5, n_computed=5))
    turn.receive(1, tokens("abc"), 1.0)
    finish(turn)
    assert kinds(turn.events) == ["started", "placed", "token", "token", "token", "finished"]
    assert [e.sequence for e in turn.events] == [0, 0, 0, 1, 2, 3]
    assert {(e.session_id, e.turn_id) for e in turn.events} == {("s", "t")}
    assert turn.events[0].started.n_prompt_tokens == 5
    assert turn.events[0].started.n_history_tokens == 2
    assert turn.events[1].placed.prefix.n_computed == 5
    assert turn.events[1].placed.candidates[0].reason == "chosen"


def test_the_last_token_ends_the_turn_without_waiting_for_the_node_to_say_so() -> None:
    turn = new_turn(max_tokens=2)
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("ab"), 1.0)
    assert turn.phase is Phase.ENDING
    assert turn.outcome is not None
    assert turn.outcome.reason is FinishReason.LENGTH
    turn.lose(1, DEAD, 1.1)
    turn.run_ended(1, common_pb2.FINISH_REASON_LENGTH, 1.1)
    assert finish(turn).reason == common_pb2.FINISH_REASON_LENGTH


def test_an_end_token_is_part_of_the_answer_and_has_no_text() -> None:
    turn = new_turn()
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, [token(0, "a"), token(1, END)], 1.0)
    done = finish(turn)
    assert done.reason == common_pb2.FINISH_REASON_END
    assert done.n_answer_tokens == 2
    assert turn.outcome is not None
    assert turn.outcome.answer_ids.tolist() == [97, END]
    assert turn.outcome.answer_text == "a"


def test_a_stop_string_ends_the_turn_with_the_token_that_completed_it() -> None:
    turn = new_turn(stop=("lo w",))
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("hello world"), 1.0)
    assert turn.outcome is not None
    assert turn.outcome.reason is FinishReason.STOP_STRING
    assert bytes(turn.outcome.answer_ids.tolist()) == b"hello w"
    assert turn.outcome.answer_text == "hel"
    finish(turn)
    assert text_of(turn.events) == "hel"


def test_text_held_back_comes_with_the_finish() -> None:
    turn = new_turn(stop=("XYZ",), max_tokens=4)
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, [*tokens("aX"), token(2, 0xE2), token(3, 0x82)], 1.0)
    done = finish(turn)
    assert done.tail_text
    assert text_of(turn.events) == turn.outcome.answer_text == "aX\ufffd"


def test_a_character_of_several_tokens_is_the_text_of_its_last_one() -> None:
    turn = new_turn(max_tokens=3)
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("€"), 1.0)
    assert [e.token.text for e in turn.events if e.HasField("token")] == ["", "", "€"]


def test_logprobs_reach_the_reader_with_text_and_survive_in_the_outcome() -> None:
    turn = new_turn(max_tokens=1)
    turn.place("a", "fp", 1, [], NOW)
    given_token = common_pb2.GeneratedToken(
        index=0, token_id=97, logprob=-0.5, top_logprobs=[common_pb2.TokenLogprob(token_id=98, logprob=-1.5)]
    )
    turn.receive(1, [given_token], 1.0)
    turn.close()
    for events in (turn.events, replay(dataclasses.replace(turn.record, outcome=turn.outcome), [], ByteText())):
        event = next(e.token for e in events if e.HasField("token"))
        assert event.logprob == -0.5
        assert [(t.token_id, t.logprob, t.text) for t in event.top_logprobs] == [(98, -1.5, "b")]


# Losing nodes.


def test_the_next_node_goes_on_where_the_last_one_stopped() -> None:
    turn = new_turn(max_tokens=4)
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("ab"), 1.0)
    turn.lose(1, DEAD, 2.0)
    assert turn.phase is Phase.WAITING
    assert turn.answer_ids == [97, 98]
    request = turn.route_request()
    assert request.n_tokens == 7
    assert request.failed == {"a": "broken_stream, UNAVAILABLE: gone"}
    turn.place("b", "fp", 2, [], NOW)
    turn.receive(2, tokens("cd", start=2), 5.0)
    done = finish(turn)
    assert kinds(turn.events) == [
        "started",
        "placed",
        "token",
        "token",
        "node_lost",
        "placed",
        "token",
        "token",
        "finished",
    ]
    assert [e.epoch for e in turn.events] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert turn.events[4].node_lost.cause == "broken_stream"
    assert turn.events[5].placed.first_index == 2
    assert text_of(turn.events) == "abcd"
    assert done.n_placements == 2
    assert done.longest_pause_seconds == 4.0
    assert done.first_token_seconds == 1.0


def test_messages_of_an_older_epoch_have_no_effect() -> None:
    turn = new_turn()
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("a"), 1.0)
    turn.lose(1, DEAD, 1.0)
    turn.receive(1, tokens("b", start=1), 1.0)
    turn.place("b", "fp", 2, [], NOW)
    turn.receive(1, tokens("z", start=1), 1.0)
    turn.lose(1, DEAD, 1.0)
    turn.report_prefix(1, common_pb2.PrefixReport())
    turn.run_ended(1, common_pb2.FINISH_REASON_END, 1.0)
    assert turn.phase is Phase.RUNNING
    assert turn.answer_ids == [97]
    assert turn.n_dropped == 2


def test_a_gap_loses_the_placement_and_no_token() -> None:
    turn = new_turn()
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, [token(0, "a"), token(2, "c"), token(3, "d")], 1.0)
    assert turn.phase is Phase.WAITING
    assert turn.answer_ids == [97]
    assert turn.events[-1].node_lost.detail == "the node sent token 2 where 1 was next"


@pytest.mark.parametrize("token_id", [-1, 257, 2**31 - 1])
def test_a_token_outside_the_vocabulary_loses_the_placement(token_id: int) -> None:
    turn = new_turn()
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, [token(0, token_id)], 1.0)
    assert turn.phase is Phase.WAITING
    assert turn.answer_ids == []


def test_a_node_that_ends_the_answer_too_early_loses_it() -> None:
    turn = new_turn()
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("a"), 1.0)
    turn.run_ended(1, common_pb2.FINISH_REASON_LENGTH, 1.0)
    assert turn.phase is Phase.WAITING
    assert "FINISH_REASON_LENGTH" in turn.events[-1].node_lost.detail


def test_a_turn_that_takes_down_three_nodes_in_a_row_fails_and_keeps_the_session_intact() -> None:
    turn = new_turn(policy=TurnPolicy(max_losses=3))
    for epoch, node in enumerate("abc", start=1):
        turn.place(node, "fp", epoch, [], NOW)
        turn.lose(epoch, DEAD, float(epoch))
    done = finish(turn)
    assert done.reason == common_pb2.FINISH_REASON_ERROR
    assert done.error_code == "placements_exhausted"
    assert "gave up after 3 placements" in done.error
    assert turn.outcome is not None
    assert not turn.outcome.kept


def test_a_new_token_clears_the_record_of_failures() -> None:
    turn = new_turn(policy=TurnPolicy(max_losses=2))
    for epoch in range(1, 20):
        turn.place("ab"[epoch % 2], "fp", epoch, [], NOW)
        turn.receive(epoch, [token(epoch - 1, "x")], float(epoch))
        turn.lose(epoch, DEAD, float(epoch))
    assert turn.phase is Phase.WAITING
    assert len(turn.failed) == 1


def test_nodes_that_drain_never_exhaust_a_turn_but_make_it_pause() -> None:
    turn = new_turn(policy=TurnPolicy(max_losses=2, max_placements=3, backoff_seconds=1.0))
    pauses = []
    for epoch in range(1, 100):
        turn.place("a", "fp", epoch, [], NOW)
        turn.lose(epoch, DRAINING, float(epoch))
        pauses.append(max(0.0, turn.next_try_s - epoch))
    assert turn.phase is Phase.WAITING
    assert [pauses[n] for n in (3, 6, 9, 12, 15, 96)] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    turn.place("a", "fp", 100, [], NOW)
    turn.receive(100, tokens("a"), 200.0)
    for epoch in range(101, 106):
        turn.lose(epoch - 1, DRAINING, 200.0)
        turn.place("a", "fp", epoch, [], NOW)
    assert turn.next_try_s == 201.0  # progress makes pauses short again


def test_a_turn_for_which_no_node_ever_has_room_fails_with_the_nodes_own_code() -> None:
    turn = new_turn(policy=TurnPolicy(max_capacity_refusals=5))
    for epoch in range(1, 6):
        turn.place("a", "fp", epoch, [], NOW)
        turn.lose(epoch, FULL, float(epoch))
    assert finish(turn).error_code == "queue_full"


def test_a_turn_with_tokens_goes_on_under_its_fingerprint_only() -> None:
    turn = new_turn()
    turn.place("a", "one", 1, [], NOW)
    turn.lose(1, DEAD, 1.0)
    assert turn.route_request().fingerprint == ""  # no token is born yet
    turn.place("b", "two", 2, [], NOW)
    turn.receive(2, tokens("a"), 1.0)
    turn.lose(2, DEAD, 1.0)
    assert turn.route_request().fingerprint == "two"


def test_a_turn_taken_up_after_a_restart_keeps_the_fingerprint_of_its_record() -> None:
    assert new_turn(resumed=True, fingerprint="one", epoch=4).route_request().fingerprint == "one"
    assert new_turn(resumed=False, fingerprint="one", epoch=4).route_request().fingerprint == ""


def test_an_epoch_that_does_not_grow_is_a_bug() -> None:
    turn = new_turn(epoch=4)
    with pytest.raises(AssertionError):
        turn.place("a", "fp", 4, [], NOW)


def test_a_reader_waits_since_the_last_node_that_worked_however_often_others_refuse() -> None:
    turn = new_turn()
    turn.place("a", "fp", 1, [], 0.0)
    turn.report_prefix(1, common_pb2.PrefixReport())
    turn.lose(1, DEAD, 1.0)
    assert turn.waiting_since_s == 1.0
    for epoch in range(2, 6):
        turn.place("b", "fp", epoch, [], float(epoch))
        turn.lose(epoch, DRAINING, epoch + 0.5)
    assert turn.waiting_since_s == 1.0
    turn.place("c", "fp", 6, [], 10.0)
    turn.lose(6, DEAD, 70.0)  # a long prefill, and then it died
    assert turn.waiting_since_s == 70.0


# Ending it from outside.


def test_cancelling_keeps_the_tokens_so_far() -> None:
    turn = new_turn()
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("ab"), 1.0)
    turn.cancel(2.0)
    turn.receive(1, tokens("c", start=2), 2.0)
    assert finish(turn).reason == common_pb2.FINISH_REASON_CANCELLED
    assert turn.outcome is not None
    assert turn.outcome.answer_text == "ab"
    assert turn.outcome.kept


def test_the_finish_is_told_only_when_it_is_durable() -> None:
    turn = new_turn(max_tokens=1)
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("a"), 1.0)
    assert "finished" not in kinds(turn.events)
    turn.close()
    assert kinds(turn.events)[-1] == "finished"


def test_finished_is_the_end_of_the_table() -> None:
    assert TRANSITIONS[Phase.FINISHED] == frozenset()
    assert set(TRANSITIONS) == set(Phase)


# Replaying it from the record.


def test_a_replayed_turn_tells_the_same_story_without_the_lost_nodes() -> None:
    turn = new_turn(max_tokens=5, stop=("never",))
    turn.place("a", "fp", 1, [], NOW)
    turn.receive(1, tokens("aé"), 1.0)
    turn.lose(1, DEAD, 2.0)
    turn.place("b", "fp", 2, [], NOW)
    turn.receive(2, tokens("ne", start=3), 3.0)
    turn.close()
    again = replay(
        dataclasses.replace(turn.record, epoch=2, outcome=turn.outcome), turn.placements, ByteText(("never",))
    )
    assert kinds(again) == [k for k in kinds(turn.events) if k != "node_lost"]
    assert [e for e in again if e.HasField("token")] == [e for e in turn.events if e.HasField("token")]
    assert again[-1] == turn.events[-1]


# Any interleaving.

ANSWER = "The quick brown fox €12 jumps"


@st.composite
def happenings(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """(what, a number, another one), as a hostile network and fleet would deal them."""
    names = ["place", "lose", "drain", "tokens", "old_tokens", "repeat", "gap", "early_end", "prefix"]
    return draw(st.lists(st.tuples(st.sampled_from(names), st.integers(0, 40), st.integers(1, 7)), max_size=60))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(happenings(), st.integers(0, 31))
def test_whatever_happens_every_reader_gets_the_exact_answer(  # noqa: C901, PLR0912 - one branch per happening
    script: list[tuple[str, int, int]], from_index: int
) -> None:
    ids = [*ANSWER.encode(), END]
    turn = new_turn(policy=TurnPolicy(max_losses=10**6, max_capacity_refusals=10**6))
    epoch, now = 0, 0.0
    for what, a, n in script:
        now += 1.0
        here = len(turn.answer_ids)
        if turn.is_over:
            break
        if what == "place" and turn.phase is Phase.WAITING:
            epoch += 1 + a % 3
            turn.place("abc"[a % 3], "fp", epoch, [], NOW)
        elif what == "lose":
            turn.lose(epoch - a % 2, DEAD, now)
        elif what == "drain":
            turn.lose(epoch, DRAINING, now)
        elif what == "tokens":
            turn.receive(epoch, [token(i, ids[i]) for i in range(here, min(here + n, len(ids)))], now)
        elif what == "old_tokens":
            turn.receive(epoch - 1, [token(i, 33) for i in range(here, here + n)], now)
        elif what == "repeat":
            first = a % (here + 1)
            turn.receive(epoch, [token(i, 33) for i in range(first, here)], now)
        elif what == "gap":
            turn.receive(epoch, [token(here + n, 33), token(here + n + 1, 33)], now)
        elif what == "early_end":
            turn.run_ended(epoch, a % 3, now)
        elif what == "prefix":
            turn.report_prefix(epoch, common_pb2.PrefixReport(n_tokens=n))
        assert turn.answer_ids == ids[: len(turn.answer_ids)], repr(turn)
    while not turn.is_over:
        if turn.phase is Phase.WAITING:
            epoch += 1
            turn.place("z", "fp", epoch, [], NOW)
        turn.receive(epoch, [token(len(turn.answer_ids), ids[len(turn.answer_ids)])], now)
    turn.close()

    sequences = [e.sequence for e in turn.events if e.HasField("token") and e.sequence >= from_index]
    assert sequences == list(range(from_index, len(ids)))
    assert [e.token.token_id for e in turn.events if e.HasField("token")] == ids
    assert text_of(turn.events) == ANSWER
    assert kinds(turn.events).count("placed") == len(turn.placements)
    epochs = [e.epoch for e in turn.events]
    assert epochs == sorted(epochs)
    assert isinstance(turn.outcome, TurnOutcome)
    assert turn.outcome.answer_text == ANSWER
