"""How nodes join, stay and leave, over real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster_kit import Cluster, all_of, code_of, eventually, ids_of, until
from scripted_worker import Script

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.proto.v1 import chat_pb2, worker_pb2


async def states(cluster: Cluster) -> dict[str, int]:
    client = cluster.client()
    nodes = (await client.stub.ListNodes(chat_pb2.ListNodesRequest())).nodes
    return {n.node_id: n.state for n in nodes}


async def until_state(cluster: Cluster, node_id: str, state: int) -> None:
    async def is_there() -> bool:
        return (await states(cluster)).get(node_id) == state

    await until(is_there)


async def test_a_node_learns_its_lease_and_the_generation(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    terms = await worker.register()
    assert (terms.coordinator_generation, terms.lease_seconds) == ((await cluster.client().status()).generation, 0.6)
    assert terms.heartbeat_seconds == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("identity", "code", "sentence"),
    [
        ({"tokenizer_digest": "0" * 64}, "model_mismatch", "start both with the same --model"),
        ({"fingerprint": ""}, "invalid_request", "fingerprint"),
        ({"context_length": 0}, "invalid_request", "context_length"),
    ],
)
async def test_a_node_that_does_not_fit_is_refused_with_the_reason(
    cluster: Cluster, identity: dict[str, Any], code: str, sentence: str
) -> None:
    worker = await cluster.worker("a", Script(mute=True), **identity)
    with pytest.raises(grpc.aio.AioRpcError, match=sentence) as error:
        await worker.register()
    assert code_of(error.value) == code
    assert await states(cluster) == {}


async def test_a_model_with_rows_of_padding_in_its_vocabulary_fits(cluster: Cluster, model: LoadedModel) -> None:
    await cluster.worker("a", vocabulary_size=model.text.vocab_size + 64)
    await cluster.client().until_nodes(1)


async def test_a_silent_node_becomes_suspect_then_dead_and_comes_back(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    await until_state(cluster, "a", chat_pb2.NODE_STATE_LIVE)
    worker.script.mute = True
    await until_state(cluster, "a", chat_pb2.NODE_STATE_SUSPECT)
    await until_state(cluster, "a", chat_pb2.NODE_STATE_DEAD)
    worker.script.mute = False
    await until_state(cluster, "a", chat_pb2.NODE_STATE_LIVE)


async def test_a_draining_node_is_shown_and_gets_no_turn(cluster: Cluster) -> None:
    leaving = await cluster.worker("a")
    await cluster.worker("b")
    client = cluster.client()
    await client.until_nodes(2)
    leaving.script.draining = True
    await until_state(cluster, "a", chat_pb2.NODE_STATE_DRAINING)
    events = await all_of(client.generate(await client.new_session()))
    assert ids_of(events)
    assert leaving.requests == []
    assert {c.node_id: c.reason for c in events[1].placed.candidates}["a"] == "cannot take it: draining"


async def test_a_node_that_leaves_is_gone(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    await until_state(cluster, "a", chat_pb2.NODE_STATE_LIVE)
    worker.script.mute = True
    await worker.deregister()
    assert await states(cluster) == {}


async def test_after_a_restart_nodes_are_asked_to_register_again_with_what_they_hold(cluster: Cluster) -> None:
    workers = [await cluster.worker(name) for name in "ab"]
    client = cluster.client()
    await client.until_nodes(2)
    session = await client.new_session()
    await all_of(client.generate(session, "One"))
    holder = next(w for w in workers if w.requests)
    await cluster.restart()
    await cluster.client().until_nodes(2)
    events = await all_of(cluster.client().generate(session, "Two"))
    assert events[1].placed.node_id == holder.node_id
    assert "tokens in memory" in next(c.reason for c in events[1].placed.candidates if c.chosen)


async def test_the_second_process_with_a_node_id_wins_and_the_first_is_told(cluster: Cluster) -> None:
    first = await cluster.worker("a")
    await cluster.client().until_nodes(1)
    second = await cluster.worker("a")
    await eventually(lambda: first.error is not None)
    assert first.error is not None
    assert code_of(first.error) == "node_id_taken"
    assert second.address in str(first.error.details())
    assert first.error.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_announced_snapshots_lead_a_turn_to_a_node_that_can_restore(
    new_cluster: Any, model: LoadedModel, tmp_path: Path
) -> None:
    store_path = tmp_path / "store"
    cluster = await new_cluster(store=str(store_path))
    busy = await cluster.worker("a")
    client = cluster.client()
    await client.until_nodes(1)
    session = await client.new_session()
    await all_of(client.generate(session, "A long enough first message to be worth saving, for the sake of the test."))
    rows = publish_session(store_path, list((await client.get(session)).token_ids), model)
    busy.published.append(worker_pb2.SnapshotInfo(name=rows.name, fingerprint="f" * 32, n_tokens=rows.n_tokens))

    async def is_known() -> bool:
        return (await client.status()).n_snapshots == 1

    await until(is_known)
    await busy.stop()
    await cluster.worker("b")
    await client.until_nodes(1)
    events = await all_of(client.generate(session, "And now?"))
    placed = [e.placed for e in events if e.HasField("placed")][-1]  # "a" may still look alive at first
    chosen = next(c for c in placed.candidates if c.chosen)
    assert (chosen.node_id, chosen.n_resident, chosen.n_stored) == ("b", 0, rows.n_tokens)
    assert "from the store" in chosen.reason


def publish_session(root: Path, token_ids: list[int], model: LoadedModel) -> Any:
    """What a node publishes after a turn, of the geometry that scripted workers name."""
    import numpy as np

    from kvferry.store.geometry import KvGeometry
    from kvferry.store.snapshot_store import SnapshotStore

    class Zeros:
        def read_rows(self, layer: int, start: int, stop: int, k_out: Any, v_out: Any) -> None:
            k_out[:], v_out[:] = 0, 0

    geometry = KvGeometry(n_layers=30, n_kv_heads=3, head_dim=64)
    store = SnapshotStore(root, "f" * 32, geometry, model.text.vocab_size, 1 << 30, 100, "a")
    store.reap()
    return store.publish(np.array(token_ids, np.int32), Zeros())
