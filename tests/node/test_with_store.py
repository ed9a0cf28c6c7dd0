"""Rows that come from the store, and a store that lies, hangs, or is not there."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.proto.v1 import common_pb2, worker_pb2
from kvferry.store import vlkv

from .running_node import SABOTAGED, RunningNode, error_of, node_command, running_node

Prompts = dict[str, list[int]]


def snapshots(store: Path) -> list[Path]:
    """Published files, of all fingerprints."""
    return sorted(store.glob("*/kv_*.kv"))


@pytest.fixture
def control(node: RunningNode) -> Callable[..., list[int]]:
    """Tokens from a node without a store, every row computed by a run that shares nothing."""

    def tokens_of(tokens: list[int], **request: object) -> list[int]:
        for resident in node.status().resident:
            node.stub.DropSession(worker_pb2.DropSessionRequest(session_id=resident.session_id), timeout=10)
        answer = node.run_turn(tokens, session="control", **request)
        assert answer.sources == (0, 0, len(tokens))
        return answer.tokens

    return tokens_of


def test_a_session_goes_on_in_another_process_from_the_store(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, control: Callable[..., list[int]]
) -> None:
    store = tmp_path / "store"
    prompt = prompts["long"]
    flags = ("--store", str(store), "--publish-every-tokens", "10000")
    with running_node(tmp_path / "first", smollm2_path, *flags) as first:
        answer = first.run_turn(prompt, max_tokens=8, end_token_ids=[])
        first.wait_for("load.snapshots_published == 1")
        first.stop(signal.SIGKILL)
    following = [*prompt, *answer.tokens, 5, 6, 7]
    with running_node(tmp_path / "second", smollm2_path, "--store", str(store)) as second:
        restored = second.run_turn(following, max_tokens=8, end_token_ids=[])
        assert restored.sources == (0, len(prompt) + 7, 4)
        assert restored.prefix is not None
        assert restored.prefix.snapshot in {path.name for path in snapshots(store)}
        assert restored.prefix.restore_seconds > 0
        assert second.status().load.restore_bytes_per_second > 0
    assert restored.tokens == control(following, max_tokens=8, end_token_ids=[])


def test_what_another_node_publishes_is_found(tmp_path: Path, smollm2_path: Path, prompts: Prompts) -> None:
    flags = ("--store", str(tmp_path / "store"), "--kv-memory", "256MiB")
    with (
        running_node(tmp_path / "a", smollm2_path, *flags) as a,
        running_node(tmp_path / "b", smollm2_path, *flags) as b,
    ):
        mine = a.run_turn(prompts["multi"], max_tokens=4)
        a.wait_for("load.snapshots_published == 1")
        theirs = b.run_turn(prompts["multi"], max_tokens=4)
        assert theirs.sources == (0, len(prompts["multi"]) - 1, 1)
        assert theirs.tokens == mine.tokens


def test_restore_and_save_can_be_asked_for(tmp_path: Path, smollm2_path: Path, prompts: Prompts) -> None:
    prompt = prompts["multi"]
    with running_node(tmp_path / "n", smollm2_path, "--store", str(tmp_path / "store")) as node:
        node.run_turn(prompt, max_tokens=4, end_token_ids=[])
        saved = node.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id="s"), timeout=20).snapshot
        assert saved.n_tokens == len(prompt) + 3
        assert saved.fingerprint == node.status().fingerprint
        path = tmp_path / "store" / saved.fingerprint / saved.name
        assert path.stat().st_size == saved.n_bytes
        node.stub.DropSession(worker_pb2.DropSessionRequest(session_id="s"), timeout=10)
        assert not node.status().resident
        request = worker_pb2.RestoreSessionRequest(session_id="new", token_ids=[*prompt, 1, 2])
        prefix = node.stub.RestoreSession(request, timeout=20).prefix
        assert (prefix.n_resident, prefix.n_restored, prefix.n_computed) == (0, len(prompt), 0)
        assert node.run_turn([*prompt, 1, 2], session="new", max_tokens=1).sources == (len(prompt), 0, 2)
        with pytest.raises(grpc.RpcError) as caught:
            node.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id="nobody"), timeout=20)
        assert error_of(caught.value)[:2] == ("NOT_FOUND", "unknown_session")


def test_a_long_answer_is_saved_on_the_way(tmp_path: Path, smollm2_path: Path, prompts: Prompts) -> None:
    flags = ("--store", str(tmp_path / "store"), "--publish-every-tokens", "64")
    prompt = prompts["chat_en"]
    with running_node(tmp_path / "n", smollm2_path, *flags) as node:
        call = node.start_turn(prompt, max_tokens=1000, end_token_ids=[])
        node.wait_for("load.snapshots_published >= 2")
        node.stop(signal.SIGKILL)
        call.cancel()
    with running_node(tmp_path / "m", smollm2_path, *flags) as node:
        assert node.run_turn([*prompt, 3], max_tokens=1).sources == (0, len(prompt), 1)


def damage_in_ids(path: Path) -> None:
    """Another token id than the name says."""
    data = bytearray(path.read_bytes())
    data[64 + 4 * 80] ^= 1
    path.write_bytes(data)


def damage_at_end(path: Path) -> None:
    """The last byte is missing."""
    data = path.read_bytes()
    path.write_bytes(data[:-1])


def damage_in_header(path: Path) -> None:
    """One layer more than the model has."""
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "when"),
    [
        (damage_in_ids, "while it runs"),
        (damage_at_end, "while it runs"),
        (damage_in_header, "before the start"),
    ],
)
def test_a_damaged_snapshot_is_refused_told_and_recomputed(
    tmp_path: Path,
    smollm2_path: Path,
    prompts: Prompts,
    control: Callable[..., list[int]],
    damage: Callable[[Path], None],
    when: str,
) -> None:
    store, prompt = tmp_path / "store", prompts["multi"]
    with running_node(tmp_path / "a", smollm2_path, "--store", str(store)) as node:
        whole = node.run_turn(prompt, max_tokens=4, end_token_ids=[])
        node.wait_for("load.snapshots_published == 1")
        (path,) = snapshots(store)
        assert path.name == vlkv.file_name(vlkv.fnv1a(_ids(prompt + whole.tokens[:3])))
        following = [*prompt, *whole.tokens, 7, 7]
        expected = control(following, max_tokens=4, end_token_ids=[])
        damage(path)
        if when == "while it runs":
            node.stub.DropSession(worker_pb2.DropSessionRequest(session_id="s"), timeout=10)
            _check_recomputed(node, following, expected, path.name)
    if when == "before the start":
        with running_node(tmp_path / "b", smollm2_path, "--store", str(store)) as node:
            _check_recomputed(node, following, expected, path.name)


def _check_recomputed(node: RunningNode, tokens: list[int], expected: list[int], name: str) -> None:
    answer = node.run_turn(tokens, max_tokens=4, end_token_ids=[])
    assert answer.tokens == expected
    assert answer.sources == (0, 0, len(tokens))
    assert answer.prefix is not None
    assert [entry.partition(":")[0] for entry in answer.prefix.refused_snapshots] == [name]
    assert node.status().load.snapshots_refused >= 1
    assert node.status().load.store_ok


def _ids(tokens: list[int]) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def test_files_of_another_shape_are_refused_and_the_node_answers(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, golden: Path
) -> None:
    store = tmp_path / "store"
    with running_node(tmp_path / "n", smollm2_path, "--store", str(store)) as node:
        folder = store / node.status().fingerprint
        malformed = [path for path in (golden / "vlkv" / "malformed").rglob("*") if path.is_file()]
        for path in malformed:
            shutil.copy(path, folder)
        names = {path.name for path in folder.glob("kv_*.kv")}
        assert names
        answer = node.run_turn(prompts["multi"], max_tokens=4)
        assert answer.sources == (0, 0, len(prompts["multi"]))
        assert answer.prefix is not None
        told = [entry.partition(":")[0] for entry in answer.prefix.refused_snapshots]
        assert told
        assert set(told) <= names
        node.wait_for("load.snapshots_published == 1")


def test_a_store_whose_calls_hang_costs_no_answer(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, orders: Path
) -> None:
    store, prompt = tmp_path / "store", prompts["multi"]
    flags = ("--store", str(store), "--store-stall-seconds", "0.5", "--drain-timeout-seconds", "1")
    with running_node(tmp_path / "n", smollm2_path, *flags, program=SABOTAGED) as node:
        expected = node.run_turn(prompt, max_tokens=4)
        node.wait_for("load.snapshots_published == 1")
        node.stub.DropSession(worker_pb2.DropSessionRequest(session_id="s"), timeout=10)
        orders.write_text("restore publish")
        answer = node.run_turn(prompt, max_tokens=4)
        assert answer.sources == (0, 0, len(prompt))
        assert answer.tokens == expected.tokens
        load = node.wait_for("not load.store_ok").load
        assert "has not answered for" in load.store_error
        assert answer.prefix is not None
        assert 0.5 <= answer.prefix.restore_seconds < 5
        following = node.run_turn(prompts["code"], session="next", max_tokens=1)
        assert following.prefix is not None
        assert following.prefix.restore_seconds == 0  # nobody waits for a store that is known to hang
        with pytest.raises(grpc.RpcError) as caught:
            node.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id="s"), timeout=1)
        assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
        orders.unlink()
        node.wait_for("load.store_ok", seconds=5)
        node.wait_for("load.snapshots_published >= 2")
        orders.write_text("publish")
        node.run_turn(prompts["long"], max_tokens=1)
        assert node.stop(seconds=20) == 0  # the hung thread is left behind


def test_a_store_that_hangs_at_the_start_is_served_without(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, orders: Path
) -> None:
    orders.write_text("reap")
    flags = ("--store", str(tmp_path / "store"), "--store-stall-seconds", "0.5")
    with running_node(tmp_path / "n", smollm2_path, *flags, program=SABOTAGED) as node:
        assert not node.status().load.store_ok
        node.run_turn(prompts["multi"], max_tokens=2)
        orders.unlink()
        node.wait_for("load.store_ok and load.snapshots_published == 1")


def test_memory_that_waits_for_a_hung_store_is_let_go(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, orders: Path
) -> None:
    flags = ("--store", str(tmp_path / "store"), "--store-stall-seconds", "0.5", "--kv-memory", "20MiB")  # 14 blocks
    orders.write_text("publish")
    with running_node(tmp_path / "n", smollm2_path, *flags, program=SABOTAGED) as node:
        for name in "abcd":  # 7 blocks each
            tokens = [1, ord(name), *prompts["long"][:200]]
            assert len(node.run_turn(tokens, session=name, max_tokens=4, end_token_ids=[]).tokens) == 4


def test_a_store_that_goes_away_fails_no_turn(tmp_path: Path, smollm2_path: Path, prompts: Prompts) -> None:
    store = tmp_path / "store"
    with running_node(tmp_path / "n", smollm2_path, "--store", str(store)) as node:
        (folder,) = store.iterdir()
        shutil.rmtree(store)
        store.write_text("not a folder any more")
        answer = node.run_turn(prompts["multi"], max_tokens=4)
        assert len(answer.tokens) == 4
        node.wait_for("load.snapshots_failed == 1 and not load.store_ok")
        assert len(node.run_turn([*prompts["multi"], 5], max_tokens=4).tokens) == 4
        store.unlink()
        folder.mkdir(parents=True)
        node.wait_for("load.store_ok", seconds=10)


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/dev/null")], ids=["file", "device"])
def test_a_store_path_that_is_no_folder_stops_the_start(
    tmp_path: Path, smollm2_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "store")
    command = node_command(smollm2_path, "--store", str(tmp_path / "store"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert str(tmp_path / "store") in done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_that_is_killed_while_it_publishes_leaves_nothing_torn(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, control: Callable[..., list[int]]
) -> None:
    store, prompt = tmp_path / "store", prompts["long"]
    random_delay = random.Random(5)
    expected = control([*prompt, 5], max_tokens=4)
    for attempt in range(6):
        with running_node(tmp_path / "n", smollm2_path, "--store", str(store)) as node:
            assert len(list(store.glob("*/*.tmp"))) == 0  # its own leftovers went at the start
            answer = node.run_turn([*prompt, 5], session=str(attempt), max_tokens=4)
            assert answer.tokens == expected
            assert answer.prefix is not None
            assert list(answer.prefix.refused_snapshots) == []
            if answer.sources[1]:
                break  # a whole snapshot survived, and its rows are right
            time.sleep(random_delay.uniform(0.0, 0.15))
            node.stop(signal.SIGKILL)
        for path in snapshots(store):
            n_tokens = int.from_bytes(path.read_bytes()[24:28], "little")
            assert path.stat().st_size == 64 + n_tokens * (4 + 30 * 2 * 4 * 192)


def test_memory_is_a_budget_and_evicted_sessions_come_back_from_the_store(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts
) -> None:
    flags = ("--store", str(tmp_path / "store"), "--kv-memory", "20MiB", "--context", "448")  # 14 blocks of 32 rows
    prompt = prompts["long"][:200]
    with running_node(tmp_path / "n", smollm2_path, *flags) as node:
        first = {}
        for name in "abcd":
            first[name] = node.run_turn([1, ord(name), *prompt], session=name, max_tokens=4, end_token_ids=[])
        status = node.wait_for("load.kv_bytes_used <= load.kv_bytes_budget and load.snapshots_published == 4")
        assert "a" not in {s.session_id for s in status.resident}
        again = node.run_turn([1, ord("a"), *prompt], session="a", max_tokens=4, end_token_ids=[])
        assert again.sources[1] == 201
        assert again.tokens == first["a"].tokens


def test_a_turn_that_cannot_have_memory_says_so_and_the_node_lives(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts
) -> None:
    with running_node(tmp_path / "n", smollm2_path, "--kv-memory", "8MiB") as node:  # 5 blocks, 160 rows
        with pytest.raises(grpc.RpcError) as caught:
            node.run_turn(prompts["long"], max_tokens=4)
        assert error_of(caught.value)[:2] == ("RESOURCE_EXHAUSTED", "out_of_kv_memory")
        with pytest.raises(grpc.RpcError) as caught:
            node.run_turn(prompts["multi"], max_tokens=400, end_token_ids=[])
        assert error_of(caught.value)[:2] == ("RESOURCE_EXHAUSTED", "out_of_kv_memory")
        assert node.run_turn(prompts["chat_en"], max_tokens=4).reason == common_pb2.FINISH_REASON_LENGTH
