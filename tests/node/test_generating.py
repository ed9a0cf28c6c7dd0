"""Turns on a real node over a real socket, without a store."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvferry.proto.v1 import common_pb2, worker_pb2

from .running_node import Answer, RunningNode, error_of

Prompts = dict[str, list[int]]
LENGTH = common_pb2.FINISH_REASON_LENGTH
CANCELLED = common_pb2.FINISH_REASON_CANCELLED
WARM = common_pb2.SamplingSettings(temperature=0.8, top_p=0.95, seed=7)


def test_an_answer_is_numbered_and_ends(node: RunningNode, prompts: Prompts, session: str) -> None:
    answer = node.run_turn(prompts["chat_en"], session=session, max_tokens=12)
    assert answer.indexes == list(range(12))
    assert answer.reason == LENGTH
    assert answer.sources == (0, 0, len(prompts["chat_en"]))
    assert answer.prefix is not None
    assert answer.prefix.prefill_seconds > 0


def test_an_end_token_is_sent_and_ends_the_answer(node: RunningNode, prompts: Prompts, session: str) -> None:
    tokens = node.run_turn(prompts["chat_en"], session=session, max_tokens=8).tokens
    answer = node.run_turn(prompts["chat_en"], session=session, max_tokens=8, end_token_ids=[tokens[3]])
    assert answer.tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert answer.reason == common_pb2.FINISH_REASON_END


@pytest.mark.parametrize("sampling", [None, WARM], ids=["greedy", "warm"])
def test_a_turn_goes_on_from_any_index_with_the_same_tokens(
    node: RunningNode, prompts: Prompts, session: str, sampling: common_pb2.SamplingSettings | None
) -> None:
    prompt = prompts["multi"]
    whole = node.run_turn(prompt, session=session, max_tokens=24, sampling=sampling, end_token_ids=[]).tokens
    for n_known in (1, 7, 23):
        node.drop(session)
        known = prompt + whole[:n_known]
        rest = node.run_turn(
            known, session=session, n_prompt_tokens=len(prompt), max_tokens=24, sampling=sampling, end_token_ids=[]
        )
        assert rest.tokens == whole[n_known:]
        assert rest.indexes == list(range(n_known, 24))


def test_a_turn_that_was_complete_on_arrival_only_ends(node: RunningNode, prompts: Prompts, session: str) -> None:
    prompt = prompts["chat_en"]
    whole = node.run_turn(prompt, session=session, max_tokens=5).tokens
    again = node.run_turn(prompt + whole, session=session, n_prompt_tokens=len(prompt), max_tokens=5)
    assert (again.tokens, again.reason) == ([], LENGTH)


def test_the_next_turn_computes_only_what_is_new(node: RunningNode, prompts: Prompts, session: str) -> None:
    prompt = prompts["multi"]
    first = node.run_turn(prompt, session=session, max_tokens=10).tokens
    history = prompt + first
    second = node.run_turn([*history, 5, 6, 7], session=session, max_tokens=4)
    assert second.sources == (len(history) - 1, 0, 4)  # the last drawn token's row was never computed
    node.drop(session)
    assert node.run_turn([*history, 5, 6, 7], session=session, max_tokens=4).tokens == second.tokens


def test_a_changed_history_keeps_the_common_part(node: RunningNode, prompts: Prompts, session: str) -> None:
    prompt = prompts["multi"]
    node.run_turn(prompt, session=session, max_tokens=10)
    changed = [*prompt[:50], 9, 9, 9]
    answer = node.run_turn(changed, session=session, max_tokens=4)
    assert answer.sources == (50, 0, 3)
    assert answer.tokens == node.run_turn(changed, session=f"{session}-again", max_tokens=4).tokens


def test_another_sessions_prefix_is_used(node: RunningNode, prompts: Prompts, session: str) -> None:
    prompt = prompts["multi"]
    mine = node.run_turn(prompt, session=session, max_tokens=4)
    other = node.run_turn(prompt, session=f"{session}-other", max_tokens=4)
    assert other.sources == (len(prompt), 0, 0)
    assert other.tokens == mine.tokens
    assert {s.session_id for s in node.status().resident} == {session, f"{session}-other"}


def test_turns_that_come_together_compute_their_common_beginning_once(
    node: RunningNode, prompts: Prompts, session: str
) -> None:
    system, n_shared = prompts["long"][:200], 192  # 200 tokens are 6 whole blocks of 32 rows, and a part of one
    questions = [[*system, 5 + i, 6, 7] for i in range(3)]
    alone = []
    for question in questions:
        alone.append(node.run_turn(question, session=session, max_tokens=4).tokens)
        node.drop(session)
    n_before = node.status().load.rows_prefilled
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(node.run_turn, q, session=f"{session}-{q[200]}", max_tokens=4) for q in questions]
        answers = [call.result() for call in calls]
    assert [answer.tokens for answer in answers] == alone
    assert node.status().load.rows_prefilled - n_before <= 203 + 2 * (203 - n_shared)
    assert sorted(answer.sources[0] >= n_shared for answer in answers) == [False, True, True]
    assert all(sum(answer.sources) == 203 for answer in answers)


def test_an_urgent_turn_goes_before_those_that_wait(node: RunningNode, prompts: Prompts, session: str) -> None:
    running = [
        node.start_turn([9, i, *prompts["chat_en"]], session=f"{session}-{i}", max_tokens=1500, end_token_ids=[])
        for i in range(4)
    ]
    node.wait_for("load.n_running == 4")
    waiting = node.start_turn([7, *prompts["chat_en"]], session=f"{session}-waits", max_tokens=1)
    node.wait_for("load.n_queued == 1")
    urgent = node.start_turn([8, *prompts["chat_en"]], session=f"{session}-urgent", max_tokens=300, priority=1)
    node.wait_for("load.n_queued == 2")
    running[0].cancel()
    _read_tokens(urgent, 1)
    assert node.status().load.n_queued == 1
    for call in (*running[1:], urgent):
        call.cancel()
    assert len(Answer().take_all(waiting).tokens) == 1


def test_sessions_that_run_together_get_what_each_gets_alone(node: RunningNode, prompts: Prompts, session: str) -> None:
    texts = {name: prompt[:160] for name, prompt in prompts.items()}
    jobs = [(name, common_pb2.SamplingSettings(temperature=t, seed=3)) for name in texts for t in (0.0, 0.9)]
    alone = [_fresh(node, texts[name], f"{session}-{i}", sampling) for i, (name, sampling) in enumerate(jobs)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        calls = [
            pool.submit(_fresh, node, texts[name], f"{session}-{i}", sampling)
            for i, (name, sampling) in enumerate(jobs)
        ]
        together = [call.result() for call in calls]
    assert together == alone


def _fresh(node: RunningNode, prompt: list[int], session: str, sampling: common_pb2.SamplingSettings) -> list[int]:
    tokens = node.run_turn(prompt, session=session, max_tokens=12, sampling=sampling).tokens
    node.drop(session)
    return tokens


def test_logprobs_are_told_when_asked_for(node: RunningNode, prompts: Prompts, session: str) -> None:
    sampling = common_pb2.SamplingSettings(logprobs=True, top_logprobs=3)
    messages = list(node.start_turn(prompts["chat_en"], session=session, max_tokens=2, sampling=sampling))
    tokens = [token for message in messages for token in message.tokens.tokens]
    for token in tokens:
        assert token.top_logprobs[0].token_id == token.token_id  # greedy
        assert token.logprob == token.top_logprobs[0].logprob
        assert len(token.top_logprobs) == 3
    plain = list(node.start_turn(prompts["chat_en"], session=session, max_tokens=2))
    assert not any(token.HasField("logprob") for message in plain for token in message.tokens.tokens)


def test_a_client_that_goes_away_frees_the_slot_and_the_rows_stay(
    node: RunningNode, prompts: Prompts, session: str
) -> None:
    call = node.start_turn(prompts["chat_en"], session=session, max_tokens=1500, end_token_ids=[])
    _read_tokens(call, 3)
    assert node.status().load.n_running == 1
    call.cancel()
    status = node.wait_for("load.n_running == 0 and load.n_queued == 0")
    steps = status.load.engine_steps
    assert {s.session_id: s.n_tokens >= 47 for s in status.resident} == {session: True}
    time.sleep(0.2)
    assert node.status().load.engine_steps == steps


def test_stop_ends_the_stream_as_cancelled(node: RunningNode, prompts: Prompts, session: str) -> None:
    call = node.start_turn(prompts["chat_en"], session=session, epoch=5, max_tokens=1500, end_token_ids=[])
    answer = _read_tokens(call, 3)
    stop = worker_pb2.StopTurnRequest(session_id=session, turn_id="t", epoch=4)
    node.stub.StopTurn(stop, timeout=10)  # of an older run: not this one
    _read_tokens(call, 3, answer)
    stop.epoch = 5
    node.stub.StopTurn(stop, timeout=10)
    answer.take_all(call)
    assert answer.reason == CANCELLED
    assert answer.indexes == list(range(len(answer.tokens)))
    assert len(answer.tokens) < 1500
    node.stub.StopTurn(worker_pb2.StopTurnRequest(session_id="nobody", turn_id="t", epoch=1), timeout=10)


def test_a_lower_epoch_is_refused(node: RunningNode, prompts: Prompts, session: str) -> None:
    node.run_turn(prompts["chat_en"], session=session, epoch=9, max_tokens=1)
    assert _refusal(node, prompts["chat_en"], session=session, epoch=8)[:2] == ("FAILED_PRECONDITION", "stale_epoch")
    node.run_turn(prompts["chat_en"], session=session, epoch=9, max_tokens=1)


def test_a_higher_epoch_takes_the_session_over(node: RunningNode, prompts: Prompts, session: str) -> None:
    old = node.start_turn(prompts["chat_en"], session=session, epoch=1, max_tokens=1500, end_token_ids=[])
    answer = _read_tokens(old, 3)
    busy = _refusal(node, prompts["chat_en"], session=session, epoch=1)
    assert busy[:2] == ("FAILED_PRECONDITION", "session_busy")
    prompt = prompts["chat_en"]
    new = node.run_turn(
        prompt + answer.tokens, session=session, epoch=2, n_prompt_tokens=len(prompt), max_tokens=len(answer.tokens) + 4
    )
    assert new.sources == (len(prompt) + len(answer.tokens) - 1, 0, 1)  # in place: the old run's rows are used
    with pytest.raises(grpc.RpcError) as caught:
        answer.take_all(old)
    assert error_of(caught.value)[:2] == ("FAILED_PRECONDITION", "stale_epoch")
    for index, token in zip(new.indexes, new.tokens, strict=True):
        assert answer.tokens[index : index + 1] in ([], [token])


@pytest.mark.parametrize(
    ("request_fields", "expected", "says"),
    [
        ({"tokens": []}, "invalid_request", "n_prompt_tokens"),
        ({"tokens": [1, 49152]}, "invalid_request", "token id 49152 lies outside the vocabulary"),
        ({"tokens": [1, -1]}, "invalid_request", "token id -1"),
        ({"tokens": [1], "n_prompt_tokens": 2}, "invalid_request", "n_prompt_tokens is 2"),
        ({"tokens": [1], "max_tokens": 0}, "invalid_request", "max_tokens must be at least 1"),
        ({"tokens": [1] * 2048}, "prompt_too_long", "leaves no room for an answer in the context of 2048"),
        ({"tokens": [1] * 3000, "n_prompt_tokens": 5}, "prompt_too_long", "3000 tokens do not fit"),
        ({"tokens": [1], "priority": 101}, "invalid_request", "priority is 101"),
        ({"tokens": [1], "session": ""}, "invalid_request", "session_id must have 1 to 256 bytes"),
        ({"tokens": [1], "turn_id": "x" * 257}, "invalid_request", "turn_id"),
        ({"tokens": [1], "sampling": common_pb2.SamplingSettings(temperature=-1)}, "invalid_sampling", "temperature"),
        (
            {"tokens": [1], "sampling": common_pb2.SamplingSettings(top_p=float("nan"))},
            "invalid_sampling",
            "top_p is nan",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    node: RunningNode, request_fields: dict[str, object], expected: str, says: str
) -> None:
    status, code, sentence = _refusal(node, **request_fields)
    assert (status, code) == ("INVALID_ARGUMENT", expected)
    assert says in sentence


def test_an_answer_ends_with_the_context(node: RunningNode, prompts: Prompts, session: str) -> None:
    prompt = (prompts["long"] * 3)[:2040]
    answer = node.run_turn(prompt, session=session, max_tokens=100, end_token_ids=[])
    assert len(answer.tokens) == 8
    assert answer.reason == LENGTH


def test_more_turns_than_may_wait_are_refused_at_once(node: RunningNode, prompts: Prompts, session: str) -> None:
    calls = [
        node.start_turn(prompts["chat_en"], session=f"{session}-{i}", max_tokens=1500, end_token_ids=[])
        for i in range(4 + 32)
    ]
    try:
        node.wait_for("load.n_running == 4 and load.n_queued == 32")
        with pytest.raises(grpc.RpcError) as caught:
            list(node.start_turn(prompts["chat_en"], session=session))
        assert error_of(caught.value)[:2] == ("RESOURCE_EXHAUSTED", "queue_full")
        assert ("retry-after-ms", "1000") in tuple(caught.value.trailing_metadata())
    finally:
        for call in calls:
            call.cancel()
    node.wait_for("load.n_running == 0 and load.n_queued == 0")


def test_a_long_prompt_does_not_hold_up_the_others(node: RunningNode, prompts: Prompts, session: str) -> None:
    call = node.start_turn(prompts["chat_en"], session=session, max_tokens=1500, end_token_ids=[])
    _read_tokens(call, 20)
    n_before = node.status().load.tokens_generated
    long = node.run_turn([5, *prompts["long"]], session=f"{session}-long", max_tokens=1)
    assert long.sources[2] == 769
    assert node.status().load.tokens_generated - n_before >= 8  # it went on all the while, in chunk after chunk
    call.cancel()


def test_the_loop_answers_while_the_engine_works(node: RunningNode, prompts: Prompts, session: str) -> None:
    call = node.start_turn(prompts["long"], session=session, max_tokens=1)
    node.wait_for("load.n_running == 1")
    answers_in_step: Counter[int] = Counter()
    while (load := node.status().load).n_running:
        answers_in_step[load.engine_steps] += 1
    assert max(answers_in_step.values()) >= 3  # several answers within one forward pass
    assert Answer().take_all(call).sources[2] == 768


def _read_tokens(call: grpc.CallIterator[worker_pb2.RunTurnResponse], n: int, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    n_wanted = len(answer.tokens) + n
    while len(answer.tokens) < n_wanted:
        answer.take(next(call))
    return answer


def _refusal(node: RunningNode, tokens: list[int], **fields: object) -> tuple[str, str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        node.run_turn(tokens, **fields)
    return error_of(caught.value)
