"""gRPC ignores an option whose name it does not know; so each option of ours is seen to act."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from free_ports import free_port

from kvferry.proto.channel import MAX_MESSAGE_BYTES, channel_options, server_options

ECHO_SERVER = Path(__file__).parent / "echo_server.py"
METHOD = "/test.Echo/Stream"

Server = tuple["subprocess.Popen[str]", int]
StartServer = Callable[[int], Server]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    started: list[subprocess.Popen[str]] = []

    def start(port: int) -> Server:
        process = subprocess.Popen([sys.executable, str(ECHO_SERVER), str(port)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def request(seconds: float, n_bytes: int = 8) -> bytes:
    return f"{seconds:08.3f}".encode().ljust(n_bytes, b".")


def call(channel: grpc.Channel, message: bytes, deadline_s: float = 30) -> Iterator[bytes]:
    answers: Iterator[bytes] = channel.unary_stream(METHOD)(message, timeout=deadline_s, wait_for_ready=True)
    return answers


def test_two_servers_cannot_share_a_port(start_server: StartServer) -> None:
    _, port = start_server(0)
    second = grpc.server(futures.ThreadPoolExecutor(1), options=server_options())
    with pytest.raises(RuntimeError, match="Failed to bind"):
        second.add_insecure_port(f"127.0.0.1:{port}")


def test_a_message_over_the_limit_is_refused_and_one_below_it_passes(start_server: StartServer) -> None:
    _, port = start_server(0)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        assert len(list(call(channel, request(0, MAX_MESSAGE_BYTES - 1024)))) == 2
        with pytest.raises(grpc.RpcError) as refusal:
            list(call(channel, request(0, MAX_MESSAGE_BYTES + 1024)))
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_call_that_is_silent_for_many_pings_lives(start_server: StartServer) -> None:
    _, port = start_server(0)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        assert len(list(call(channel, request(9)))) == 2


def test_a_server_that_is_too_busy_to_shake_hands_at_once_is_reached(start_server: StartServer) -> None:
    process, port = start_server(0)
    process.send_signal(signal.SIGSTOP)  # its socket still takes connections
    busy = threading.Timer(0.5, process.send_signal, [signal.SIGCONT])
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        busy.start()
        assert len(list(channel.unary_stream(METHOD)(request(0), timeout=20))) == 2
    busy.join()


def test_a_frozen_server_is_noticed_long_before_the_default_minute(start_server: StartServer) -> None:
    process, port = start_server(0)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        answers = call(channel, request(60), deadline_s=50)
        next(answers)
        process.send_signal(signal.SIGSTOP)
        frozen_at = time.monotonic()
        with pytest.raises(grpc.RpcError) as failure:
            next(answers)
        noticed_after = time.monotonic() - frozen_at
        process.send_signal(signal.SIGCONT)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert noticed_after < 20


def test_a_server_that_comes_back_is_found_again_soon(start_server: StartServer) -> None:
    process, port = start_server(free_port())
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        assert list(call(channel, request(0)))
        process.kill()
        process.wait()
        time.sleep(6)  # the default back-off would by now have grown beyond the wait below
        start_server(port)
        back_at = time.monotonic()
        assert list(call(channel, request(0)))
        assert time.monotonic() - back_at < 3
