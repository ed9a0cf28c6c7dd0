"""A conversation branches between two turns, or at any token of an answer; sessions that nobody uses go."""

from __future__ import annotations

import dataclasses

import grpc.aio
import numpy as np
import pytest
from cluster_kit import Client, Cluster, all_of, code_of, ids_of, until
from scripted_worker import Script, scripted_answer

from kvferry.coordinator.cutting import cut_at
from kvferry.coordinator.errors import IndexOutOfRange
from kvferry.coordinator.registry import FinishReason, Message, TurnOutcome, TurnRecord
from kvferry.proto.v1 import chat_pb2, common_pb2, worker_pb2


class Letters:
    """Token n is the n-th letter."""

    vocab_size = 26
    end_token_ids = (25,)

    def push(self, token_id: int) -> tuple[str, bool]:
        return chr(97 + token_id), False

    def flush(self) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id])


def turn(turn_id: str, prompt: list[int], answer: list[int], n_history: int) -> TurnRecord:
    details = worker_pb2.GeneratedTokens(
        tokens=[common_pb2.GeneratedToken(index=i, token_id=t, logprob=-1.0) for i, t in enumerate(answer)]
    )
    outcome = TurnOutcome(
        reason=FinishReason.END, answer_ids=np.array(answer, np.int32),
        answer_text=b"".join(map(Letters().token_bytes, answer)).decode(), logprobs=details.SerializeToString(),
    )  # fmt: skip
    return TurnRecord(
        session_id="s", turn_id=turn_id, messages=(Message("user", "q"),), n_history_tokens=n_history,
        prompt_ids=np.array(prompt, np.int32), sampling=b"", max_tokens=9, stop=(), digest="d", created_at_ms=0,
        outcome=outcome,
    )  # fmt: skip


TURNS = [turn("t1", [1, 2], [3, 4, 5], 0), turn("t2", [6], [7, 8], 5)]
ALL = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("n_tokens", "why"), [(1, "inside"), (2, "inside"), (6, "inside"), (9, "8 tokens"), (99, "8 tok")]
)
def test_a_cut_inside_a_question_or_beyond_the_end_is_refused(n_tokens: int, why: str) -> None:
    with pytest.raises(IndexOutOfRange, match=why):
        cut_at(TURNS, n_tokens, lambda _: Letters())


@pytest.mark.parametrize("n_tokens", [0, 3, 4, 5, 7, 8])
def test_every_other_cut_keeps_exactly_the_first_tokens(n_tokens: int) -> None:
    cut = cut_at(TURNS, n_tokens, lambda _: Letters())
    kept = TURNS[: cut.n_turns]
    if cut.last_outcome is not None:
        kept[-1] = dataclasses.replace(kept[-1], outcome=cut.last_outcome)
    assert [i for t in kept for i in (*t.prompt_ids.tolist(), *t.outcome.answer_ids.tolist())] == ALL[:n_tokens]
    for one in kept:
        n_answer = len(one.outcome.answer_ids)
        assert len(one.outcome.answer_text) == n_answer
        assert len(worker_pb2.GeneratedTokens.FromString(one.outcome.logprobs).tokens) == n_answer


async def fork(client: Client, session: str, name: str, **where: int) -> chat_pb2.Session:
    request = chat_pb2.ForkSessionRequest(session_id=session, new_session_id=name, **where)
    return (await client.stub.ForkSession(request)).session


async def test_a_fork_inside_an_answer_goes_on_from_there(cluster: Cluster) -> None:
    worker = await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    answer = ids_of(await all_of(client.generate(session, "Hi", max_tokens=10)))
    tokens = list((await client.get(session)).token_ids)
    made = await fork(client, session, "branch", n_tokens=len(tokens) - 4)
    assert (made.n_tokens, made.n_turns, made.forked_from) == (len(tokens) - 4, 1, session)
    details = await client.get("branch")
    assert list(details.token_ids) == tokens[:-4]
    assert details.turns[0].n_answer_tokens == 6
    replayed = await all_of(client.resume("branch"))
    assert ids_of(replayed) == answer[:6]
    assert "".join(e.token.text for e in replayed) + replayed[-1].finished.tail_text == details.turns[0].answer
    more = ids_of(await all_of(client.generate("branch", "And?", max_tokens=5)))
    prompt = list(worker.requests[-1].token_ids)
    assert prompt[: len(tokens) - 4] == tokens[:-4]
    assert more == scripted_answer(prompt, 0, 5)
    assert list((await client.get(session)).token_ids) == tokens  # the parent is as it was


async def test_asking_a_turn_anew_is_a_fork_before_it(cluster: Cluster) -> None:
    """Edit and regenerate: the branch shares the rows of what came before."""
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await all_of(client.generate(session, "One. " * 30))
    await all_of(client.generate(session, "Two?"))
    await fork(client, session, "edited", n_turns=1)
    placed = next(e.placed for e in await all_of(client.generate("edited", "Three?")) if e.HasField("placed"))
    assert next(c for c in placed.candidates if c.chosen).n_resident > 60


async def test_samples_of_one_prompt_are_forks_with_seeds_of_their_own(cluster: Cluster) -> None:
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await all_of(client.generate(session, "Hi"))
    answers = []
    for number in range(3):
        await fork(client, session, f"sample{number}")
        answers.append(ids_of(await all_of(client.generate(f"sample{number}", "And?", seed=number))))
    assert len({tuple(answer) for answer in answers}) == 3
    await fork(client, session, "again")
    assert ids_of(await all_of(client.generate("again", "And?", seed=1))) == answers[1]


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ({"n_tokens": 3}, "index_out_of_range"),
        ({"n_tokens": 9_999}, "index_out_of_range"),
        ({"n_turns": 1, "n_tokens": 1}, "invalid_request"),
    ],
)
async def test_a_fork_where_none_can_be_is_refused(cluster: Cluster, where: dict[str, int], code: str) -> None:
    await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await all_of(client.generate(session, "Hi"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fork(client, session, "x", **where)
    assert code_of(refused.value) == code


async def test_sessions_that_nobody_uses_are_deleted(new_cluster) -> None:
    cluster = await new_cluster(expire_days=1.5 / 86_400)
    worker = await cluster.worker("a", Script())
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await all_of(client.generate(session, "Hi"))
    assert session in worker.resident

    async def is_gone() -> bool:
        try:
            await client.get(session)
        except grpc.aio.AioRpcError as e:
            return code_of(e) == "unknown_session"
        return False

    await until(is_gone)
    await until(lambda: dropped(worker, session))


async def dropped(worker: object, session: str) -> bool:
    return session in worker.dropped
