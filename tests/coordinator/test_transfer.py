"""A session goes from one cluster to another and goes on there with the same bits; what is no session is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import Client, Cluster, Processes, all_of, code_of, eventually, ids_of
from registry_kit import outcome, turn
from registry_kit import session as session_record
from test_images import picture

from kvferry.coordinator.errors import BadRequest
from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.coordinator.transfer import exported
from kvferry.proto.v1 import chat_pb2, common_pb2, worker_pb2

SAMPLING = common_pb2.SamplingSettings(temperature=0.8, seed=11)


async def export(client: Client, session_id: str) -> chat_pb2.ExportedSession:
    return (await client.stub.ExportSession(chat_pb2.ExportSessionRequest(session_id=session_id))).session


async def import_(client: Client, session: chat_pb2.ExportedSession, name: str = "") -> chat_pb2.Session:
    return (await client.stub.ImportSession(chat_pb2.ImportSessionRequest(session=session, session_id=name))).session


@pytest.fixture
async def clusters(new_cluster: Callable[..., Any]) -> list[Cluster]:
    made = [await new_cluster() for _ in range(2)]
    for cluster in made:
        await cluster.worker("a")
        await cluster.client().until_nodes(1)
    return made


async def talked(client: Client) -> str:
    session = await client.new_session()
    tool = chat_pb2.Tool(name="river", description="finds one", parameters='{"type": "object"}')
    await all_of(client.generate(session, "One", tools=[tool], stop=["zzz"]))
    logprobs = common_pb2.SamplingSettings(temperature=0.8, seed=3, logprobs=True)
    await all_of(client.generate(session, "Two", turn_id="t2", sampling=logprobs))
    return session


async def test_an_imported_session_is_the_same_and_goes_on_with_the_same_tokens(clusters: list[Cluster]) -> None:
    here, there = (cluster.client() for cluster in clusters)
    session = await talked(here)
    made = await import_(there, await export(here, session))
    assert (made.session_id, made.n_turns) == (session, 2)
    before, after = await here.get(session), await there.get(session)
    assert list(before.token_ids) == list(after.token_ids)
    for ours, theirs in zip(before.turns, after.turns, strict=True):
        ours.ClearField("placements")
        assert ours == theirs
    assert ids_of(await all_of(there.resume(session, "t2"))) == ids_of(await all_of(here.resume(session, "t2")))
    answers = [ids_of(await all_of(c.generate(session, "Three", sampling=SAMPLING))) for c in (here, there)]
    assert answers[0] == answers[1]
    assert (await export(there, session)).turns[2].answer_ids == answers[0]


async def test_what_a_session_was_asked_goes_with_it(clusters: list[Cluster]) -> None:
    here, there = (cluster.client() for cluster in clusters)
    session = await talked(here)
    await import_(there, await export(here, session))
    # the same request is the same turn, and other tools are refused there as here
    logprobs = common_pb2.SamplingSettings(temperature=0.8, seed=3, logprobs=True)
    again = await all_of(there.generate(session, "Two", turn_id="t2", sampling=logprobs))
    assert ids_of(again) == ids_of(await all_of(here.resume(session, "t2")))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await all_of(there.generate(session, "Now", tools=[chat_pb2.Tool(name="other")]))
    assert code_of(error.value) == "invalid_tools"


async def test_a_name_that_is_taken_is_refused_and_another_can_be_given(clusters: list[Cluster]) -> None:
    here = clusters[0].client()
    session = await talked(here)
    carried = await export(here, session)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await import_(here, carried)
    assert code_of(error.value) == "session_exists"
    assert (await import_(here, carried, "copy")).n_tokens == (await here.get(session)).session.n_tokens


async def test_deleted_and_imported_again_no_node_takes_it_for_an_old_one(clusters: list[Cluster]) -> None:
    here = clusters[0].client()
    session = await talked(here)
    carried = await export(here, session)
    await here.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id=session))
    await import_(here, carried)
    await all_of(here.generate(session, "Three"))
    epochs = [r.epoch for r in clusters[0].worker_named("a").requests if r.session_id == session]
    assert epochs == sorted(set(epochs))


def test_what_does_not_fit_loses_its_log_probabilities_and_then_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    details = worker_pb2.GeneratedTokens(tokens=[common_pb2.GeneratedToken(index=n, logprob=-1) for n in range(2)])
    finished = dataclasses.replace(
        turn(), sampling=b"", outcome=outcome(logprobs=details.SerializeToString()), pictures=()
    )  # fmt: skip
    whole = exported(session_record(), [finished], {})
    assert len(whole.turns[0].logprobs) == 2
    monkeypatch.setattr("kvferry.coordinator.transfer.MAX_EXPORT_BYTES", whole.ByteSize() - 1)
    assert not exported(session_record(), [finished], {}).turns[0].logprobs
    monkeypatch.setattr("kvferry.coordinator.transfer.MAX_EXPORT_BYTES", 10)
    with pytest.raises(BadRequest, match="fork it with fewer turns"):
        exported(session_record(), [finished], {})


async def test_pictures_go_with_it(new_cluster: Callable[..., Any], chat_model: Callable[[str], Path]) -> None:
    seeing = LoadedModel.load(str(chat_model("qwen3vlmoe_bf16")))
    here, there = [await new_cluster(model=seeing) for _ in range(2)]
    for cluster in (here, there):
        await cluster.worker("a", sees_images=True)
        await cluster.client().until_nodes(1)
        cluster.worker_named("a").script.answer = [300, 301, 302]
    message = chat_pb2.ChatMessage(role="user", content="What?", images=[chat_pb2.Image(data=picture(9), at=0)])
    session = await here.client().new_session()
    await all_of(here.client().generate(session, messages=[message]))
    carried = await export(here.client(), session)
    await import_(there.client(), carried)
    await all_of(there.client().generate(session, "And?"))
    (first,), (second,) = here.worker_named("a").requests, there.worker_named("a").requests
    assert list(second.images) == list(first.images)
    carried.pixels[:] = [picture(10)]
    with pytest.raises(grpc.aio.AioRpcError, match=r"turn 1 of the session cannot be imported.*no pixels"):
        await import_(there.client(), carried, "other")


async def test_a_session_of_another_tokenizer_is_refused(
    clusters: list[Cluster], new_cluster: Callable[..., Any], model: LoadedModel
) -> None:
    other = LoadedModel(text=dataclasses.replace(model.text, digest="another"), context_length=8192)
    stranger = await new_cluster(model=other)
    here = clusters[0].client()
    carried = await export(here, await talked(here))
    with pytest.raises(grpc.aio.AioRpcError, match="whose tokens mean nothing to") as error:
        await import_(stranger.client(), carried)
    assert code_of(error.value) == "model_mismatch"


def first(session: chat_pb2.ExportedSession) -> chat_pb2.ExportedTurn:
    return session.turns[0]


SPOILT: list[tuple[Callable[[chat_pb2.ExportedSession], Any], str]] = [
    (lambda s: first(s).prompt_ids.append(10**9), "a token lies outside the vocabulary"),
    (lambda s: first(s).answer_ids.append(-1), "a token lies outside the vocabulary"),
    (lambda s: first(s).ClearField("prompt_ids"), "its prompt has no tokens"),
    (lambda s: first(s).ClearField("messages"), "the prompt is empty"),
    (lambda s: setattr(first(s).messages[0], "role", "king"), "the role 'king'"),
    (lambda s: setattr(first(s), "finish_reason", 5), "its finish reason is 5"),
    (lambda s: setattr(first(s), "finish_reason", 77), "its finish reason is 77"),
    (lambda s: setattr(first(s), "max_tokens", 1), "was allowed 1"),
    (lambda s: setattr(first(s), "turn_id", "../etc"), "turn_id is '../etc'"),
    (lambda s: setattr(first(s), "turn_id", "t2"), "two turns of the session have one id"),
    (lambda s: first(s).stop.append(""), "stop string 2 has 0 characters"),
    (lambda s: setattr(first(s).sampling, "temperature", float("nan")), "temperature is nan"),
    (lambda s: first(s).tools.append(chat_pb2.Tool(name="a b")), "has the name 'a b'"),
    (lambda s: first(s).logprobs.add(index=99), "log-probabilities"),
    (lambda s: first(s).pictures.add(n_tokens=1), "it has images, and the model takes none"),
    (lambda s: first(s).messages[0].images.add(data=b"x"), "images"),
    (lambda s: setattr(s.turns[1].messages[0], "role", "system"), "the last message has the role system"),
    (lambda s: first(s).prompt_ids.extend([5] * 9_000), "more than 8192 tokens"),
    (lambda s: s.pixels.append(b"no picture"), "an image of the session cannot be read"),
    (lambda s: setattr(s, "tenant", "a/b"), "tenant is 'a/b'"),
]


async def test_what_no_cluster_exported_is_refused_and_leaves_nothing(clusters: list[Cluster]) -> None:
    here, there = (cluster.client() for cluster in clusters)
    whole = await export(here, await talked(here))
    for spoil, says in SPOILT:
        carried = chat_pb2.ExportedSession()
        carried.CopyFrom(whole)
        spoil(carried)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await import_(there, carried)
        assert says in str(error.value.details())
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, says
    assert (await there.status()).n_sessions == 0


def kvferry(*arguments: object) -> str:
    run = [sys.executable, "-c", "from kvferry.client.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # four real processes
async def test_rows_go_with_it_to_another_store(
    tmp_path: Path, chat_model: Callable[[str], Path], model: LoadedModel
) -> None:
    path = chat_model("qwen3_untied_f32")
    places = [tmp_path / name for name in ("here", "there")]
    clusters, clients = [], []
    try:
        for place in places:
            place.mkdir()
            clusters.append(Processes(place, path, model))
            _, address = clusters[-1].coordinator("127.0.0.1:0", "--store", str(place / "store"))
            clusters[-1].node("a", address, place / "store")
            clients.append((address, Client(address)))
        for _, client in clients:
            await client.until_nodes(1, patience_s=120)
        (here, ours), (there, theirs) = clients
        session = await ours.new_session()
        await all_of(ours.generate(session, "Go on for long, please. " * 8, max_tokens=60, sampling=SAMPLING))
        n_tokens = (await ours.get(session)).session.n_tokens
        export_rows = ("sessions", "export", session, tmp_path / "s.kvs", "--coordinator", here, "--rows", "--store")
        await eventually(lambda: list(places[0].glob("store/*/kv3_*.kv")))
        kvferry(*export_rows, places[0] / "store")
        kvferry("sessions", "import", tmp_path / "s.kvs", "--coordinator", there, "--store", places[1] / "store")
        answers = [
            await all_of(client.generate(session, "And then?", max_tokens=20, sampling=SAMPLING))
            for client in (ours, theirs)
        ]
        assert ids_of(answers[0]) == ids_of(answers[1])
        prefix = next(e.placed.prefix for e in answers[1] if e.HasField("placed"))
        assert prefix.n_restored > n_tokens / 2, clusters[1].logs()
    finally:
        for _, client in clients:
            await client.channel.close()
        for cluster in clusters:
            cluster.close()
