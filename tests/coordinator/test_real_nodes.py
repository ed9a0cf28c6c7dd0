"""The same with engines: two real nodes, one of them killed in the middle of an answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from cluster_kit import Client, Processes, all_of, eventually, ids_of, take_tokens, until

from kvferry.proto.v1 import chat_pb2, common_pb2

QUESTION = "Write a short story about a lighthouse keeper and a lost ship."
N_TOKENS = 250  # so that there is time to kill a node before they are all on their way
SAMPLING = common_pb2.SamplingSettings(temperature=0.8, seed=11)


async def test_an_answer_goes_on_bit_for_bit_when_its_board_dies(processes: Processes, tmp_path: Path) -> None:
    _, address = processes.coordinator("127.0.0.1:0", "--store", str(tmp_path / "store"))
    nodes = {name: processes.node(name, address, tmp_path / "store") for name in "ab"}
    client = Client(address)
    try:
        await client.until_nodes(2, patience_s=120)
        session = await client.new_session()
        events = client.generate(session, QUESTION, turn_id="t", max_tokens=N_TOKENS, sampling=SAMPLING)
        first = await take_tokens(events, 7)
        serving = (await client.get(session)).turns[0].placements[0].node_id
        os.kill(nodes[serving].pid, signal.SIGKILL)
        rest = await all_of(events)
        answer = first + ids_of(rest)
        assert [e.node_lost.node_id for e in rest if e.HasField("node_lost")] == [serving], processes.logs()
        undisturbed = await all_of(
            client.generate(await client.new_session(), QUESTION, max_tokens=N_TOKENS, sampling=SAMPLING)
        )
        assert answer == ids_of(undisturbed), processes.logs()
        assert rest[-1].finished.n_placements == 2
        follow_up = await all_of(client.generate(session, "And then?", max_tokens=8))
        placed = next(e.placed for e in follow_up if e.HasField("placed"))
        assert placed.prefix.n_resident > len(answer)  # the node that took over holds the conversation
        await check_samples(client)
    finally:
        await client.channel.close()


async def check_samples(client: Client) -> None:
    """On one node: what several answers share is computed once, and each is the answer with its seed."""
    question, n = " ".join(f"Item {number} of a long list." for number in range(40)), 4
    session = await client.new_session()
    message = chat_pb2.ChatMessage(role="user", content=question)
    request = chat_pb2.GenerateRequest(
        session_id=session, messages=[message], max_tokens=12, sampling=SAMPLING, n_samples=n
    )
    samples: dict[int, list[chat_pb2.TurnEvent]] = {}
    async for response in client.stub.Generate(request):
        samples.setdefault(response.sample, []).append(response.event)
    prefixes = [e.placed.prefix for events in samples.values() for e in events if e.HasField("placed")]
    n_prompt = prefixes[0].n_tokens
    assert (len(prefixes), n_prompt > 250) == (n, True)
    assert sum(prefix.n_computed for prefix in prefixes) < n_prompt + n * 32  # the last block is each one's own
    for number, events in samples.items():
        sampling = common_pb2.SamplingSettings(temperature=0.8, seed=SAMPLING.seed + number)
        alone = client.generate(await client.new_session(), question, max_tokens=12, sampling=sampling)
        assert ids_of(events) == ids_of(await all_of(alone))


async def test_a_node_with_another_store_is_noticed_and_told_of(processes: Processes, tmp_path: Path) -> None:
    _, address = processes.coordinator("127.0.0.1:0", "--store", str(tmp_path / "store"))
    same = processes.node("a", address, tmp_path / "store")
    processes.node("b", address, tmp_path / "elsewhere")
    client = Client(address)
    try:
        await client.until_nodes(2, patience_s=120)

        async def seen() -> dict[str, chat_pb2.NodeInfo]:
            nodes = (await client.stub.ListNodes(chat_pb2.ListNodesRequest())).nodes
            return {node.node_id: node for node in nodes}

        async def told() -> bool:
            return (await seen())["b"].other_store

        await until(told)
        assert not (await seen())["a"].other_store
        assert (await seen())["a"].pid == same.pid
        assert (await seen())["a"].HasField("store")
        await eventually(lambda: "node b saves to another store" in processes.logs())
    finally:
        await client.channel.close()


async def test_a_session_resumes_from_an_encrypted_store(processes: Processes, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    sealed = ("--store-key-file", str(key), "--store-encrypted")
    _, address = processes.coordinator("127.0.0.1:0", "--store", str(tmp_path / "store"), *sealed)
    nodes = {name: processes.node(name, address, tmp_path / "store", *sealed) for name in "ab"}
    client = Client(address)
    try:
        await client.until_nodes(2, patience_s=120)
        session = await client.new_session()
        answer = ids_of(await all_of(client.generate(session, QUESTION, max_tokens=64, sampling=SAMPLING)))
        serving = (await client.get(session)).turns[0].placements[0].node_id
        await eventually(lambda: list((tmp_path / "store").glob("*/*.kv")))
        os.kill(nodes[serving].pid, signal.SIGKILL)
        follow_up = await all_of(client.generate(session, "And then?", max_tokens=4))
        placed = [e.placed for e in follow_up if e.HasField("placed")][-1]
        assert placed.prefix.n_restored >= len(answer), processes.logs()
        saved = b"".join(file.read_bytes() for file in (tmp_path / "store").glob("*/*.kv"))
        assert np.array(answer[:16], "<i4").tobytes() not in saved
    finally:
        await client.channel.close()


@pytest.mark.slow
async def test_a_node_with_another_key_is_told_of_and_its_answers_stay_right(
    processes: Processes, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    keys = []
    for number in (1, 2):
        key = tmp_path / f"key-{number}"
        key.write_text(f"{number:064x}")
        key.chmod(0o600)
        keys.append(("--store-key-file", str(key)))
    _, address = processes.coordinator("127.0.0.1:0", "--store", str(store), *keys[0])
    a = processes.node("a", address, store, *keys[0])
    client = Client(address)
    try:
        await client.until_nodes(1, patience_s=120)
        undisturbed, moved = await client.new_session(), await client.new_session()
        answer = ids_of(await all_of(client.generate(undisturbed, QUESTION, max_tokens=N_TOKENS, sampling=SAMPLING)))
        right = ids_of(await all_of(client.generate(undisturbed, "And then?", max_tokens=16, sampling=SAMPLING)))
        assert ids_of(await all_of(client.generate(moved, QUESTION, max_tokens=N_TOKENS, sampling=SAMPLING))) == answer
        await eventually(lambda: list(store.glob("*/*.kv")))
        saved = set(store.glob("*/*.kv"))

        processes.node("b", address, store, *keys[1])
        await client.until_nodes(2, patience_s=120)

        async def told() -> bool:
            nodes = (await client.stub.ListNodes(chat_pb2.ListNodesRequest())).nodes
            return {node.node_id: node.other_key for node in nodes} == {"a": False, "b": True}

        await until(told)
        await eventually(lambda: "node b has another store key" in processes.logs())

        os.kill(a.pid, signal.SIGKILL)
        events = await all_of(client.generate(moved, "And then?", max_tokens=16, sampling=SAMPLING))
        placed = [event.placed for event in events if event.HasField("placed")][-1]
        assert (placed.node_id, placed.prefix.n_restored) == ("b", 0), processes.logs()
        assert ids_of(events) == right
        assert saved <= set(store.glob("*/*.kv")), "files of another key are not damaged"
    finally:
        await client.channel.close()
