"""The committed stubs are what the .proto files give."""

from kvferry.proto.generate import stale_stubs


def test_stubs_are_not_stale() -> None:
    assert stale_stubs() == []
