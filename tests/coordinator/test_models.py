"""Several models behind one coordinator: a session speaks to one of them, and nothing of another is used for it."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import Client, Cluster, Processes, all_of, code_of, ids_of, read_while_it_lasts, take_tokens
from scripted_worker import Script

from kvferry.coordinator.errors import InvalidSettings
from kvferry.coordinator.loaded_model import LoadedModel, served
from kvferry.proto.v1 import chat_pb2, common_pb2

TINY = "qwen3_untied_f32"
SHORT = Script(answer=range(300, 308))  # the tiny vocabulary has not what scripts draw else
SAMPLING = common_pb2.SamplingSettings(temperature=0.8, seed=11)


@pytest.fixture(scope="session")
def tiny(chat_model: Callable[[str], Path]) -> LoadedModel:
    return LoadedModel.load(str(chat_model(TINY)))


@pytest.fixture
async def cluster(new_cluster: Callable[..., Any], model: LoadedModel, tiny: LoadedModel) -> Cluster:
    return await new_cluster(models=[model, tiny])


def serves(model: LoadedModel, fingerprint: str) -> dict[str, Any]:
    text = model.text
    return {
        "tokenizer_digest": text.digest, "vocabulary_size": text.vocab_size, "model": text.model_name,
        "fingerprint": fingerprint,
    }  # fmt: skip


async def session_with(client: Client, model: str = "") -> str:
    made = await client.stub.CreateSession(chat_pb2.CreateSessionRequest(model=model))
    return made.session.session_id


async def test_a_session_is_answered_by_its_model_alone(
    cluster: Cluster, model: LoadedModel, tiny: LoadedModel
) -> None:
    large = await cluster.worker("large", **serves(model, "1" * 32))
    small = await cluster.worker("small", SHORT, **serves(tiny, "2" * 32))
    client = cluster.client()
    await client.until_nodes(2)
    for name, node, other in ((tiny.text.model_name, small, large), ("", large, small)):
        session = await session_with(client, name)
        for text in ("One", "Two"):
            events = await all_of(client.generate(session, text))
            placed = next(e.placed for e in events if e.HasField("placed"))
            reasons = {c.node_id: c.reason for c in placed.candidates}
            assert placed.node_id == node.node_id
            assert reasons[other.node_id].startswith("cannot take it: it serves ")
        assert (await client.get(session)).session.model == (name or model.text.model_name)
    for node, served_model in ((large, model), (small, tiny)):
        assert len(node.requests) == 2
        assert all(tuple(r.end_token_ids) == served_model.text.end_token_ids for r in node.requests)


async def test_a_fork_keeps_its_parent_s_model(cluster: Cluster, tiny: LoadedModel) -> None:
    client = cluster.client()
    session = await session_with(client, tiny.text.model_name)
    fork = await client.stub.ForkSession(chat_pb2.ForkSessionRequest(session_id=session))
    assert fork.session.model == tiny.text.model_name


async def test_a_turn_whose_model_has_no_node_waits_although_others_are_idle(
    cluster: Cluster, model: LoadedModel, tiny: LoadedModel
) -> None:
    await cluster.worker("large", **serves(model, "1" * 32))
    client = cluster.client()
    await client.until_nodes(1)
    session = await session_with(client, tiny.text.model_name)
    _, error = await read_while_it_lasts(client.generate(session))
    assert error is not None
    assert (error.code(), code_of(error)) == (grpc.StatusCode.UNAVAILABLE, "no_node")
    assert "it serves" in str(error.details())
    await cluster.worker("small", SHORT, **serves(tiny, "2" * 32))
    assert len(ids_of(await all_of(client.resume(session)))) == 8


async def test_the_models_are_listed_with_their_nodes(cluster: Cluster, model: LoadedModel, tiny: LoadedModel) -> None:
    await cluster.worker("a", **serves(tiny, "2" * 32))
    await cluster.worker("b", **serves(tiny, "3" * 32))
    client = cluster.client()
    await client.until_nodes(2)
    listed = (await client.stub.ListModels(chat_pb2.ListModelsRequest())).models
    assert [(m.name, m.n_nodes, list(m.fingerprints)) for m in listed] == [
        (model.text.model_name, 0, []),
        (tiny.text.model_name, 2, ["2" * 32, "3" * 32]),
    ]
    assert [m.tokenizer_digest for m in listed] == [model.text.digest, tiny.text.digest]
    assert list((await client.status()).models) == [m.name for m in listed]


async def test_an_unknown_model_is_refused_with_those_there_are(cluster: Cluster, tiny: LoadedModel) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"no model 'gpt' here.*{tiny.text.model_name}") as error:
        await session_with(cluster.client(), "gpt")
    assert (error.value.code(), code_of(error.value)) == (grpc.StatusCode.NOT_FOUND, "unknown_model")


async def test_a_node_with_another_model_is_refused_with_one_sentence(
    new_cluster: Callable[..., Any], model: LoadedModel, tiny: LoadedModel
) -> None:
    cluster = await new_cluster(models=[model])
    worker = await cluster.worker("small", Script(mute=True), **serves(tiny, "2" * 32))
    with pytest.raises(grpc.aio.AioRpcError, match=f"serves {tiny.text.model_name}.*--model") as error:
        await worker.register()
    assert code_of(error.value) == "model_mismatch"


async def test_models_with_one_tokenizer_are_told_apart_by_name(
    new_cluster: Callable[..., Any], model: LoadedModel
) -> None:
    sister = dataclasses.replace(model, text=dataclasses.replace(model.text, model_name="sister"))
    cluster = await new_cluster(models=[model, sister])
    await cluster.worker("sister", **serves(sister, "2" * 32))
    nameless = await cluster.worker("nameless", Script(mute=True), **{**serves(model, "3" * 32), "model": "?"})
    client = cluster.client()
    await client.until_nodes(1)
    assert ids_of(await all_of(client.generate(await session_with(client, "sister"))))
    _, error = await read_while_it_lasts(client.generate(await session_with(client)))
    assert error is not None
    with pytest.raises(grpc.aio.AioRpcError, match="node nameless serves"):
        await nameless.register()
    with pytest.raises(InvalidSettings, match=r"two of the models are called sister"):
        served([sister, model, sister])


@pytest.mark.slow  # three loads of real models
async def test_two_real_models_side_by_side_and_a_board_of_one_dies(
    processes: Processes, chat_model: Callable[[str], Path], tiny: LoadedModel, tmp_path: Path
) -> None:
    store, tiny_path = tmp_path / "store", str(chat_model(TINY))
    _, address = processes.coordinator("127.0.0.1:0", "--store", str(store), "--model", tiny_path)
    large = processes.node("large", address, store)
    small = {name: processes.node(name, address, store, "--model", tiny_path) for name in ("s1", "s2")}
    client = Client(address)
    try:
        await client.until_nodes(3, patience_s=120)
        nodes = {n.node_id: n for n in (await client.status()).nodes}
        assert nodes["s1"].fingerprint == nodes["s2"].fingerprint != nodes["large"].fingerprint
        ours, theirs = await session_with(client, tiny.text.model_name), await session_with(client)
        events = client.generate(ours, "Go on for long, please. " * 8, turn_id="t", max_tokens=200, sampling=SAMPLING)
        first = await take_tokens(events, 5)
        serving = (await client.get(ours)).turns[0].placements[0].node_id
        os.kill(small[serving].pid, signal.SIGKILL)
        rest = await all_of(events)
        (other,) = small.keys() - {serving}
        assert [e.placed.node_id for e in rest if e.HasField("placed")] == [other], processes.logs()
        again = await session_with(client, tiny.text.model_name)
        undisturbed = client.generate(again, "Go on for long, please. " * 8, max_tokens=200, sampling=SAMPLING)
        assert first + ids_of(rest) == ids_of(await all_of(undisturbed))
        answer = await all_of(client.generate(theirs, "A river?", max_tokens=4, sampling=SAMPLING))
        assert [e.placed.node_id for e in answer if e.HasField("placed")] == ["large"]
        # each board gave its rows to the store under its own fingerprint, and was never offered another's
        os.kill(large.pid, signal.SIGTERM)
        os.kill(small[other].pid, signal.SIGTERM)
        assert {large.wait(30), small[other].wait(30)} == {0}, processes.logs()
        assert {n.fingerprint for n in nodes.values()} == fingerprints_in(store)
        processes.node("s3", address, store, "--model", tiny_path)
        await client.until_nodes(1, patience_s=120)
        restored = await all_of(client.generate(ours, "And then?", max_tokens=4))
        prefix = next(e.placed.prefix for e in restored if e.HasField("placed"))
        assert (prefix.n_restored > 200, list(prefix.refused_snapshots)) == (True, [])
    finally:
        await client.channel.close()


def fingerprints_in(store: Path) -> set[str]:
    """Of the files there, which lie in a folder for each."""
    return {path.parent.name for path in store.glob("*/kv*.kv")}
