"""Rows that come from the store, and a store that lies, hangs, or is not there."""

from __future__ import annotations

import errno
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from kvferry.proto.v1 import common_pb2, worker_pb2
from kvferry.store import vlkv3
from kvferry.store.fs import FileSystem

from .running_node import SABOTAGED, Answer, RunningNode, error_of, node_command, running_node

pytestmark = pytest.mark.alone  # a store counts as hung after half a second here

Prompts = dict[str, list[int]]
Own = Callable[[list[int]], list[int]]
Control = Callable[..., list[int]]


def save(node: RunningNode, session: str = "s") -> worker_pb2.SnapshotInfo:
    """Publish a session's rows now."""
    return node.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id=session), timeout=20).snapshot


@pytest.fixture
def control(node: RunningNode) -> Control:
    """Tokens from a node without a store, every row computed by a run that shares nothing."""

    def tokens_of(tokens: list[int], **request: object) -> list[int]:
        node.drop_all()
        answer = node.run_turn(tokens, session="control", **request)
        assert answer.sources == (0, 0, len(tokens))
        return answer.tokens

    return tokens_of


def test_a_session_goes_on_in_another_process_and_what_another_publishes_is_found(
    tmp_path: Path,
    smollm2_path: Path,
    stored: RunningNode,
    store_of: Path,
    prompts: Prompts,
    own: Own,
    control: Control,
) -> None:
    prompt = own(prompts["long"])
    flags = ("--store", str(store_of.parent), "--publish-every-tokens", "10000", "--kv-memory", "256MiB")
    with running_node(tmp_path / "other", smollm2_path, *flags) as other:
        answer = other.run_turn(prompt, max_tokens=8, end_token_ids=[])
        other.wait_for("load.snapshots_published == 1")
        other.stop(signal.SIGKILL)
    following = [*prompt, *answer.tokens, 5, 6, 7]
    restored = stored.run_turn(following, max_tokens=8, end_token_ids=[])
    assert restored.sources == (0, len(prompt) + 7, 4)
    assert restored.prefix is not None
    assert restored.prefix.snapshot in {path.name for path in store_of.glob("kv*.kv")}
    assert restored.prefix.restore_seconds > 0
    assert stored.status().load.restore_bytes_per_second > 0
    assert restored.tokens == control(following, max_tokens=8, end_token_ids=[])


def test_restore_and_save_can_be_asked_for(
    stored: RunningNode, store_of: Path, prompts: Prompts, own: Own, session: str
) -> None:
    prompt = own(prompts["multi"])
    stored.run_turn(prompt, session=session, max_tokens=4, end_token_ids=[])
    saved = save(stored, session)
    assert saved.n_tokens == len(prompt) + 3
    assert saved.fingerprint == stored.status().fingerprint
    assert (store_of / saved.name).stat().st_size == saved.n_bytes
    stored.drop(session)
    assert not stored.status().resident
    request = worker_pb2.RestoreSessionRequest(session_id=f"{session}-new", token_ids=[*prompt, 1, 2])
    prefix = stored.stub.RestoreSession(request, timeout=20).prefix
    assert (prefix.n_resident, prefix.n_restored, prefix.n_computed) == (0, len(prompt), 0)
    assert stored.run_turn([*prompt, 1, 2], session=f"{session}-new", max_tokens=1).sources == (len(prompt), 0, 2)
    with pytest.raises(grpc.RpcError) as caught:
        save(stored, "nobody")
    assert error_of(caught.value)[:2] == ("NOT_FOUND", "unknown_session")


def test_rows_are_recomputed_for_whoever_knows_that_to_be_sooner(
    stored: RunningNode, prompts: Prompts, own: Own, session: str
) -> None:
    prompt = own(prompts["multi"])
    stored.run_turn(prompt, session=session, max_tokens=1)
    save(stored, session)
    stored.drop(session)
    assert stored.run_turn(prompt, session=session, max_tokens=1, recompute=True).sources == (0, 0, len(prompt))
    stored.drop(session)
    assert stored.run_turn(prompt, session=session, max_tokens=1).sources == (0, len(prompt), 0)


def test_a_long_answer_is_saved_on_the_way(stored: RunningNode, prompts: Prompts, own: Own, session: str) -> None:
    prompt = own(prompts["chat_en"])
    n_before = stored.status().load.snapshots_published
    call = stored.start_turn(prompt, session=session, max_tokens=1000, end_token_ids=[])
    stored.wait_for(f"load.snapshots_published >= {n_before + 2} and load.n_running == 1")
    call.cancel()
    stored.wait_for("load.n_running == 0")
    stored.drop(session)
    assert stored.run_turn([*prompt, 3], session=session, max_tokens=1).sources == (0, len(prompt), 1)


def test_rows_are_restored_while_the_turn_waits_for_its_place(
    small: RunningNode, prompts: Prompts, own: Own, session: str
) -> None:
    prompt = own(prompts["multi"])
    small.run_turn(prompt, session=session, max_tokens=1)
    save(small, session)
    small.drop(session)
    running = small.start_turn(own([5]), session="running", max_tokens=200, end_token_ids=[])
    answer = Answer()
    answer.take(next(running))
    waiting = small.start_turn(prompt, session=session, max_tokens=1)
    names = f"resident.get('{session}') == {len(prompt)}"  # it has its rows, and no place yet
    small.wait_for(f"load.n_running == 1 and load.n_queued == 1 and {names}")
    running.cancel()
    assert Answer().take_all(waiting).sources == (0, len(prompt), 0)


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


@pytest.mark.parametrize("damage", [damage_in_ids, damage_at_end])
def test_a_snapshot_that_is_damaged_while_the_node_runs_is_refused_told_and_recomputed(
    stored: RunningNode,
    store_of: Path,
    prompts: Prompts,
    own: Own,
    control: Control,
    session: str,
    damage: Callable[[Path], None],
) -> None:
    prompt = own(prompts["chat_en"] * 2)  # too short to be saved on the way
    whole = stored.run_turn(prompt, session=session, max_tokens=4, end_token_ids=[])
    name = save(stored, session).name
    following = [*prompt, *whole.tokens, 7, 7]
    damage(store_of / name)
    stored.drop(session)
    _check_recomputed(stored, session, following, control(following, max_tokens=4, end_token_ids=[]), name)
    (store_of / name).unlink(missing_ok=True)


def test_a_snapshot_that_was_damaged_before_the_start_is_refused_told_and_recomputed(
    tmp_path: Path,
    smollm2_path: Path,
    stored: RunningNode,
    store_of: Path,
    prompts: Prompts,
    own: Own,
    control: Control,
    session: str,
) -> None:
    prompt = own(prompts["chat_en"] * 2)
    whole = stored.run_turn(prompt, session=session, max_tokens=4, end_token_ids=[])
    name = save(stored, session).name
    assert name.startswith("kv3_")
    copied = tmp_path / "store" / store_of.name / name
    copied.parent.mkdir(parents=True)
    shutil.copy(store_of / name, copied)
    damage_in_header(copied)
    following = [*prompt, *whole.tokens, 7, 7]
    expected = control(following, max_tokens=4, end_token_ids=[])
    with running_node(tmp_path / "n", smollm2_path, "--store", str(tmp_path / "store")) as started:
        _check_recomputed(started, session, following, expected, name)


def _check_recomputed(node: RunningNode, session: str, tokens: list[int], expected: list[int], name: str) -> None:
    answer = node.run_turn(tokens, session=session, max_tokens=4, end_token_ids=[])
    assert answer.tokens == expected
    assert answer.sources == (0, 0, len(tokens))
    assert answer.prefix is not None
    assert [entry.partition(":")[0] for entry in answer.prefix.refused_snapshots] == [name]
    assert node.status().load.snapshots_refused >= 1
    assert node.status().load.store_ok


def test_rows_before_a_damaged_block_are_used_and_the_rest_is_computed(
    stored: RunningNode, store_of: Path, prompts: Prompts, own: Own, control: Control, session: str
) -> None:
    prompt = own(prompts["chat_en"] * 2)
    whole = stored.run_turn(prompt, session=session, max_tokens=4, end_token_ids=[])
    name = save(stored, session).name
    following = [*prompt, *whole.tokens, 7, 7]
    data = bytearray((store_of / name).read_bytes())
    extent = vlkv3.parse_extent(bytes(data), None)
    data[extent.block_offset(17, extent.first_block + 2) + 100] ^= 8
    (store_of / name).write_bytes(data)
    expected = control(following, max_tokens=4, end_token_ids=[])
    stored.drop(session)
    answer = stored.run_turn(following, session=session, max_tokens=4, end_token_ids=[])
    n_good = (extent.first_block + 2) * 32
    assert answer.tokens == expected
    assert answer.sources == (0, n_good, len(following) - n_good)
    assert answer.prefix is not None
    assert [entry.partition(":")[0] for entry in answer.prefix.refused_snapshots] == [name]
    assert not (store_of / name).exists()


def test_files_of_another_shape_are_refused_and_the_node_answers(
    stored: RunningNode, store_of: Path, prompts: Prompts, own: Own, session: str, golden: Path
) -> None:
    prompt = own(prompts["multi"])
    malformed = list((golden / "vlkv" / "malformed").rglob("kv_*.kv"))
    n_before = stored.status().load.snapshots_published
    names = {path.name for path in malformed}
    assert names
    for path in malformed:
        shutil.copy(path, store_of)
    answer = stored.run_turn(prompt, session=session, max_tokens=4)
    for name in names:
        (store_of / name).unlink(missing_ok=True)
    assert answer.sources == (0, 0, len(prompt))
    assert answer.prefix is not None
    told = [entry.partition(":")[0] for entry in answer.prefix.refused_snapshots]
    assert told
    assert set(told) <= names
    stored.wait_for(f"load.snapshots_published > {n_before}")


def test_a_store_whose_calls_hang_costs_no_answer(
    stored: RunningNode, prompts: Prompts, own: Own, session: str
) -> None:
    prompt = own(prompts["multi"])
    expected = stored.run_turn(prompt, session=session, max_tokens=4)
    n_before = save(stored, session) and stored.status().load.snapshots_published
    stored.drop(session)
    stored.orders.write_text("restore publish")
    answer = stored.run_turn(prompt, session=session, max_tokens=4)
    assert answer.sources == (0, 0, len(prompt))
    assert answer.tokens == expected.tokens
    load = stored.wait_for("not load.store_ok").load
    assert "has not answered for" in load.store_error
    assert answer.prefix is not None
    assert 0.5 <= answer.prefix.restore_seconds < 5
    following = stored.run_turn(own(prompts["code"]), session=f"{session}-next", max_tokens=1)
    assert following.prefix is not None
    assert following.prefix.restore_seconds == 0  # nobody waits for a store that is known to hang
    with pytest.raises(grpc.RpcError) as caught:
        stored.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id=session), timeout=1)
    assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    stored.orders.unlink()
    stored.wait_for("load.store_ok", seconds=5)
    stored.wait_for(f"load.snapshots_published > {n_before}")


FILE_SYSTEM_CALLS = sorted(name for name, it in vars(FileSystem).items() if name[0] != "_" and callable(it))
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def test_no_error_of_any_call_of_the_disk_fails_a_turn(
    stored: RunningNode, prompts: Prompts, own: Own, session: str
) -> None:
    """Each turn would read a snapshot and write one; the errors alternate, so that all meet several calls."""
    prompt = own(prompts["multi"])
    expected = stored.run_turn(prompt, session=session, max_tokens=24, end_token_ids=[]).tokens
    save(stored, session)
    for number, call in enumerate(FILE_SYSTEM_CALLS * 2):
        stored.drop(session)
        stored.orders.write_text(f"{call}:{ERRORS[(number + number // len(FILE_SYSTEM_CALLS)) % len(ERRORS)]}")
        asked = [number, *prompt] if number % 2 else prompt  # one that there is nothing of, and one to be restored
        answer = stored.run_turn(asked, session=session, max_tokens=24, end_token_ids=[])
        assert len(answer.tokens) == 24
        assert number % 2 or answer.tokens == expected, call
    stored.orders.unlink()
    stored.wait_for("load.store_ok", seconds=5)
    stored.drop(session)
    assert stored.run_turn(prompt, session=session, max_tokens=1).sources[1] >= len(prompt) - 1


def test_a_restore_never_waits_behind_a_publish(stored: RunningNode, prompts: Prompts, own: Own, session: str) -> None:
    prompt = own(prompts["multi"])
    stored.run_turn(prompt, session=session, max_tokens=1)
    save(stored, session)
    stored.drop(session)
    stored.orders.write_text("publish")
    stored.run_turn(own([1, *prompts["multi"]]), session=f"{session}-other", max_tokens=1)
    stored.wait_for("not load.store_ok")  # the publish of that turn hangs
    assert stored.run_turn(prompt, session=session, max_tokens=1).sources == (0, len(prompt), 0)
    assert not stored.status().load.store_ok


def test_a_store_that_hangs_at_the_start_is_served_without(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts
) -> None:
    orders = tmp_path / "n" / "orders"
    orders.parent.mkdir()
    orders.write_text("reap")
    flags = ("--store", str(tmp_path / "store"), "--store-stall-seconds", "0.5", "--drain-timeout-seconds", "1")
    with running_node(tmp_path / "n", smollm2_path, *flags, program=SABOTAGED) as node:
        assert not node.status().load.store_ok
        node.run_turn(prompts["multi"], max_tokens=2)
        orders.unlink()
        node.wait_for("load.store_ok and load.snapshots_published == 1")
        orders.write_text("publish")
        node.run_turn(prompts["code"], max_tokens=1)
        assert node.stop(seconds=20) == 0  # the hung thread is left behind


def test_memory_that_waits_for_a_hung_store_is_let_go(small: RunningNode, prompts: Prompts, own: Own) -> None:
    small.orders.write_text("publish")
    for name in "abcd":  # 7 blocks each
        tokens = own([ord(name), *prompts["long"][:200]])
        assert len(small.run_turn(tokens, session=name, max_tokens=4, end_token_ids=[]).tokens) == 4


def test_a_store_that_goes_away_fails_no_turn(stored: RunningNode, store_of: Path, prompts: Prompts, own: Own) -> None:
    store, prompt = store_of.parent, own(prompts["multi"])
    n_before = stored.status().load.snapshots_failed
    shutil.rmtree(store)
    store.write_text("not a folder any more")
    assert len(stored.run_turn(prompt, max_tokens=4, end_token_ids=[]).tokens) == 4
    stored.wait_for(f"load.snapshots_failed > {n_before} and not load.store_ok")
    assert len(stored.run_turn([*prompt, 5], max_tokens=4, end_token_ids=[]).tokens) == 4
    store.unlink()
    store_of.mkdir(parents=True)
    stored.wait_for("load.store_ok", seconds=10)


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


@pytest.mark.parametrize("n_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_node_that_is_killed_while_it_publishes_leaves_nothing_torn(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, control: Control, n_kills: int
) -> None:
    store, prompt = tmp_path / "store", prompts["long"]
    random_delay = random.Random(5)
    expected = control([*prompt, 5], max_tokens=4)
    for attempt in range(n_kills):
        with running_node(tmp_path / "n", smollm2_path, "--store", str(store)) as node:
            assert len(list(store.glob("*/*.tmp"))) == 0  # its own leftovers went at the start
            answer = node.run_turn([*prompt, 5], session=str(attempt), max_tokens=4)
            assert answer.tokens == expected
            assert answer.prefix is not None
            assert list(answer.prefix.refused_snapshots) == []
            time.sleep(random_delay.uniform(0.0, 0.15))
            node.stop(signal.SIGKILL)
        for path in store.glob("*/kv3_*.kv"):
            assert path.stat().st_size == vlkv3.parse_extent(path.read_bytes()[:320], None).file_bytes


def test_memory_is_a_budget_and_evicted_sessions_come_back_from_the_store(
    small: RunningNode, prompts: Prompts, own: Own
) -> None:
    n_before = small.status().load.snapshots_published
    requests = {name: own([ord(name), *prompts["long"][:200]]) for name in "abcd"}  # 7 blocks each, of 14
    first = {
        name: small.run_turn(tokens, session=name, max_tokens=4, end_token_ids=[]) for name, tokens in requests.items()
    }
    status = small.wait_for(
        f"load.kv_bytes_used <= load.kv_bytes_budget and load.snapshots_published == {n_before + 4}"
    )
    assert "a" not in {s.session_id for s in status.resident}
    again = small.run_turn(requests["a"], session="a", max_tokens=4, end_token_ids=[])
    assert again.sources[1] == 202
    assert again.tokens == first["a"].tokens


def test_a_turn_that_cannot_have_memory_says_so_and_the_node_lives(
    small: RunningNode, prompts: Prompts, own: Own
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        small.run_turn(own(prompts["long"]), max_tokens=4)
    assert error_of(caught.value)[:2] == ("RESOURCE_EXHAUSTED", "out_of_kv_memory")
    with pytest.raises(grpc.RpcError) as caught:
        small.run_turn(own(prompts["long"][:400]), max_tokens=100, end_token_ids=[])  # 448 rows are all there is
    assert error_of(caught.value)[:2] == ("RESOURCE_EXHAUSTED", "out_of_kv_memory")
    assert small.run_turn(own(prompts["chat_en"]), max_tokens=4).reason == common_pb2.FINISH_REASON_LENGTH
