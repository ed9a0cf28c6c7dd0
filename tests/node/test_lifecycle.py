"""Starting, telling so, and ending."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from free_ports import free_port
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.node.cli import node as node_group
from kvferry.node.errors import NodeUnreachable
from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import worker_pb2

from .running_node import BIG_LITTLE, SABOTAGED, Answer, RunningNode, error_of, node_command, running_node

Prompts = dict[str, list[int]]
Own = Callable[[list[int]], list[int]]
SERVICE = "kvferry.v1.WorkerService"


def test_health_and_reflection_are_the_standard_ones(node: RunningNode) -> None:
    health = health_pb2_grpc.HealthStub(node.channel)
    for name in ("", SERVICE):
        assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status == 1
    reflection = reflection_pb2_grpc.ServerReflectionStub(node.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = reflection.ServerReflectionInfo(iter([request]), timeout=20)
    assert SERVICE in {service.name for service in answer.list_services_response.service}


def test_the_engine_has_the_big_cores_and_everything_else_the_little_ones(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one processor has no big and little ones")
    big = allowed[-1]
    capacities = (1024 if number == big else 530 for number in range(big + 1))
    monkeypatch.setenv("KVFERRY_TEST_CAPACITIES", ",".join(map(str, capacities)))
    flags = ("--threads", "1", "--store", str(tmp_path / "store"))
    with running_node(tmp_path / "n", smollm2_path, *flags, program=BIG_LITTLE) as node:
        node.run_turn(prompts["code"])
        threads = Path(f"/proc/{node.process.pid}/task")
        places = {}
        for path in threads.iterdir():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                places[int(path.name)] = os.sched_getaffinity(int(path.name))
        on_big = [thread for thread, cores in places.items() if cores == {big}]
        assert len(on_big) == 1  # the engine's only one
        assert node.process.pid not in on_big
        n_little = sum(cores == set(allowed) - {big} for cores in places.values())
        assert n_little > len(places) / 2, places


def test_a_life_from_loading_to_drained(tmp_path: Path, smollm2_path: Path, prompts: Prompts) -> None:
    port, orders = free_port(), tmp_path / "n" / "orders"
    flags = ("--listen", f"127.0.0.1:{port}", "--log-level", "debug")
    orders.parent.mkdir()
    orders.write_text("load")  # however late we look, it has not loaded yet
    with (
        running_node(tmp_path / "n", smollm2_path, *flags, wait=False, program=SABOTAGED) as process,
        grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel,
    ):
        grpc.channel_ready_future(channel).result(60)
        health = health_pb2_grpc.HealthStub(channel)
        seen = [health.Check(health_pb2.HealthCheckRequest(), timeout=20).status]
        node = RunningNode(process.process, "", process.log_path, channel)
        with pytest.raises(grpc.RpcError) as caught:
            node.run_turn([1])
        assert error_of(caught.value)[:2] == ("UNAVAILABLE", "starting")
        orders.unlink()
        while seen[-1] != health_pb2.HealthCheckResponse.SERVING:
            seen.append(health.Check(health_pb2.HealthCheckRequest(), timeout=20).status)
            time.sleep(0.05)
        assert seen[0] == health_pb2.HealthCheckResponse.NOT_SERVING

        canary = [31415, 27182, 31415, 27182]
        node.run_turn([*prompts["chat_en"], *canary], max_tokens=4)

        turn = node.start_turn([*prompts["chat_en"], *canary], session="t", max_tokens=32, end_token_ids=[])
        begun = Answer()
        begun.take(next(turn))
        drain = node.stub.Drain.future(worker_pb2.DrainRequest(finish_seconds=60), timeout=70)
        assert len(begun.take_all(turn).tokens) == 32  # it had the time to finish
        assert drain.result().n_turns_moved == 0
        with pytest.raises(grpc.RpcError) as caught:
            node.run_turn([1])
        assert error_of(caught.value)[:2] == ("UNAVAILABLE", "draining")
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        again = CliRunner().invoke(node_group, ["drain", f"127.0.0.1:{port}"])
        assert again.output == "drained: 0 sessions saved, 0 turns moved\n"

        assert node.stop() == 0
        assert "31415" not in node.log  # no token and no text is logged
        assert "27182" not in node.log


def test_the_ready_file_says_where_it_serves(node: RunningNode) -> None:
    folder = node.log_path.parent
    ready = json.loads((folder / "ready.json").read_text())
    assert ready == {"address": node.address, "pid": node.process.pid, "node_id": folder.name}


def test_bytes_that_are_no_message_are_the_callers_mistake(node: RunningNode) -> None:
    for method in ("RunTurn", "GetNodeStatus"):
        with pytest.raises(grpc.RpcError) as caught:
            list(node.channel.unary_stream(f"/{SERVICE}/{method}")(b"\xff" * 9, timeout=10))
        assert error_of(caught.value)[:2] == ("INVALID_ARGUMENT", "invalid_request")
    assert "Traceback" not in node.log


def test_a_port_in_use_is_one_sentence(node: RunningNode, smollm2_path: Path) -> None:
    command = node_command(smollm2_path, "--listen", node.address)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()  # none of gRPC's own
    assert line.startswith(f"error: cannot listen at {node.address}: address already in use; stop what uses it")


def test_a_port_that_is_taken_while_we_look_is_one_sentence_too(node: RunningNode, smollm2_path: Path) -> None:
    blind = "import kvferry.proto.address as a; a.why_not_listen = lambda address: None; "
    command = node_command(smollm2_path, "--listen", node.address)
    command[2] = command[2].replace("main()", f"{blind}main()")
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    (line,) = done.stderr.splitlines()  # gRPC would print lines of its own here
    assert line.startswith(f"error: cannot listen at {node.address}: ")


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(node_command(tmp_path / "none.gguf"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "error: there is no model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_cut_in_half_is_one_sentence(tmp_path: Path, smollm2_path: Path) -> None:
    half = tmp_path / "half.gguf"
    half.write_bytes(smollm2_path.read_bytes()[:40_000_000])
    done = subprocess.run(node_command(half), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_saves_and_ends_and_moves_the_turns(tmp_path: Path, smollm2_path: Path, prompts: Prompts) -> None:
    store = tmp_path / "store"
    with running_node(tmp_path / "n", smollm2_path, "--store", str(store), "--context", "2048") as node:
        call = node.start_turn(prompts["chat_en"], max_tokens=1900, end_token_ids=[])
        answer = Answer()
        answer.take(next(call))
        node.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            answer.take_all(call)
        assert error_of(caught.value)[:2] == ("UNAVAILABLE", "draining")
        assert node.process.wait(20) == 0
        assert "Traceback" not in node.log
    assert len(list(store.glob("*/kv3_*.kv"))) == 1


def test_a_second_signal_ends_it_at_once(tmp_path: Path, smollm2_path: Path) -> None:
    with running_node(tmp_path / "n", smollm2_path, wait=False) as node:
        while node.process.poll() is None:
            node.process.send_signal(signal.SIGTERM)
            try:
                node.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        assert node.process.returncode in {0, -signal.SIGTERM, 128 + signal.SIGTERM}


def test_status_shows_a_node_to_a_person(node: RunningNode) -> None:
    result = CliRunner().invoke(node_group, ["status", node.address])
    assert result.exit_code == 0
    for words in (node.status().node_id, "serving", "fingerprint", "K/V memory", "event loop"):
        assert words in result.output


def test_status_for_programs_is_the_message_as_json(node: RunningNode) -> None:
    result = CliRunner().invoke(node_group, ["status", node.address, "--json"])
    assert result.exit_code == 0
    told = json.loads(result.output)
    status = node.status()
    assert (told["node_id"], told["context_length"]) == (status.node_id, status.context_length)
    assert told["draining"] is False  # also what is false or nothing is there
    assert told["load"]["n_running"] == 0


@pytest.mark.parametrize("address", ["", "host", "127.0.0.1:99999", "127.0.0.1:0"])
def test_status_of_what_is_no_address_is_a_usage_error(address: str) -> None:
    result = CliRunner().invoke(node_group, ["status", address])
    assert result.exit_code == 2
    assert f"{address!r}" in result.output


def test_status_of_nobody_is_one_sentence() -> None:
    result = CliRunner().invoke(node_group, ["status", "127.0.0.1:1"])
    assert isinstance(result.exception, NodeUnreachable)


def test_an_engine_that_hangs_is_seen_from_outside(stored: RunningNode, prompts: Prompts, own: Own) -> None:
    assert stored.status().load.stalled_seconds == 0
    stored.orders.write_text("hang")
    call = stored.start_turn(own(prompts["chat_en"]), max_tokens=4, end_token_ids=[])
    stalled = stored.wait_for("load.stalled_seconds > 0.5").load
    assert stalled.n_running + stalled.n_queued == 1
    stored.orders.unlink()
    assert len(Answer().take_all(call).tokens) == 4
    stored.wait_for("load.stalled_seconds == 0")


def test_an_engine_that_hangs_does_not_hold_up_the_end(tmp_path: Path, smollm2_path: Path, prompts: Prompts) -> None:
    with running_node(tmp_path / "n", smollm2_path, "--drain-timeout-seconds", "1", program=SABOTAGED) as node:
        node.orders.write_text("hang")
        call = node.start_turn(prompts["chat_en"], session="other", max_tokens=4)
        node.wait_for("load.stalled_seconds > 0.1")
        assert node.stop(seconds=20) == 0  # the hung thread is left behind
        call.cancel()


def test_an_engine_that_fails_ends_the_node_and_tells_its_turns(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts
) -> None:
    with running_node(tmp_path / "n", smollm2_path, program=SABOTAGED) as node:
        node.orders.write_text("fail")
        with pytest.raises(grpc.RpcError) as caught:
            node.run_turn(prompts["chat_en"], max_tokens=4)
        assert error_of(caught.value)[:2] == ("INTERNAL", "internal")
        assert "send the turn to another one" in error_of(caught.value)[2]
        assert node.process.wait(20) == 1
