"""Cables that fall silent, between real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.drills.targets.proxy import Relay

SILENCE_S = 0.2


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """Says everything back, and hangs up at "bye"."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(1 << 16):
                    if data == b"bye":
                        return
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(SILENCE_S)
    try:
        connection.recv(100)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(10)
    return False


@pytest.mark.parametrize("directions", [{"into": False, "out": False}, {"out": False}, {"into": False}])
def test_a_silent_cable_delivers_late_and_closes_nothing(
    relay: Relay, echo: tuple[str, int], directions: dict[str, bool]
) -> None:
    with connect(relay.listen("board", lambda: echo, part_dials=True)) as connection:
        connection.sendall(b"one")
        assert connection.recv(100) == b"one"
        relay.set("board", **directions)
        connection.sendall(b"two")
        assert is_silent(connection)
        with connect(relay.listen("board", lambda: echo, part_dials=True)) as another:
            another.sendall(b"new")
            assert is_silent(another)
            relay.set("board")
            assert connection.recv(100) == b"two"
            assert another.recv(100) == b"new"


def test_whose_words_are_lost_follows_from_who_is_behind_the_cable(relay: Relay) -> None:
    """The board hears and is not heard, whether it called or was called."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        for part_dials in (True, False):
            with connect(relay.listen("board", lambda: place, part_dials=part_dials)) as dialling:
                accepted, _ = server.accept()
                accepted.settimeout(10)
                board, other = (dialling, accepted) if part_dials else (accepted, dialling)
                other.sendall(b"are you there?")
                assert board.recv(100) == b"are you there?"
                relay.set("board", out=False)
                other.sendall(b"still?")
                heard.append(board.recv(100))
                board.sendall(b"yes!")
                assert is_silent(other)
                relay.set("board")
                assert other.recv(100) == b"yes!"
                accepted.close()
    assert heard == [b"still?"] * 2


def test_an_end_is_not_heard_over_a_silent_cable(relay: Relay, echo: tuple[str, int]) -> None:
    with connect(relay.listen("board", lambda: echo, part_dials=False)) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
        relay.set("board", out=False)
        connection.sendall(b"bye")
        assert is_silent(connection)
        relay.set("board")
        assert connection.recv(100) == b""


def test_a_slow_cable_takes_its_time(relay: Relay, echo: tuple[str, int]) -> None:
    port = relay.listen("board", lambda: echo, part_dials=True)
    relay.set("board", delay_s=0.1, bytes_per_s=10_000)
    with connect(port) as connection:
        began = time.monotonic()
        connection.sendall(b"x" * 1000)
        assert len(connection.recv(2000)) == 1000
        assert time.monotonic() - began >= 2 * (0.1 + 0.1)  # there and back


def test_nobody_behind_the_cable_is_a_closed_connection(relay: Relay) -> None:
    with connect(relay.listen("board", lambda: None, part_dials=False)) as connection:
        assert connection.recv(100) == b""
