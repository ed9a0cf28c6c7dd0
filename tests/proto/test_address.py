"""HOST:PORT from a person."""

from __future__ import annotations

import socket

import pytest

from kvferry.proto.address import parse_address, why_not_listen


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("board1:7070", ("board1", 7070)), ("[::1]:65535", ("[::1]", 65535)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_an_address_is_its_host_and_its_port(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("127.0.0.1:99999", "has port 99999: a port lies between 1 and 65535"),
        ("127.0.0.1:65536", "between 1 and 65535"),
        ("h:" + "9" * 5000, "between 1 and 65535"),
        ("h:0", "between 1 and 65535"),
        ("h:-1", "'-1' is no port number"),
        ("h:٣", "is no port number"),
        ("h:", "is no port number"),
        ("", "is not HOST:PORT"),
        (":7070", "is not HOST:PORT"),
        ("::1:7070", "is not HOST:PORT"),
        ("a b:1", "is not HOST:PORT"),
        ("http://h:1", "is not HOST:PORT"),
        ("h/v1:1", "is not HOST:PORT"),
        ("h", "is not HOST:PORT"),
    ],
)
def test_what_is_none_is_refused_with_the_true_reason(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_address(text)


def test_only_who_listens_may_take_any_port() -> None:
    assert parse_address("h:0", to_listen=True) == ("h", 0)
    with pytest.raises(ValueError, match="between 0 and 65535"):
        parse_address("h:65536", to_listen=True)


def test_why_nobody_can_listen_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = why_not_listen(f"127.0.0.1:{taken.getsockname()[1]}")
    assert said == "address already in use; stop what uses it, or give another --listen"
    assert "is no address of this machine" in (why_not_listen("192.0.2.1:7070") or "")
    for name in ("nohost.invalid", "x" * 70, "a..b"):
        said = why_not_listen(f"{name}:7070") or ""
        assert f"the host name {name} is not known" in said
        assert "stop what uses it" not in said
    assert why_not_listen("127.0.0.1:0") is None
