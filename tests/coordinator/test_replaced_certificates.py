"""Certificates that are replaced while a coordinator waits for a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.coordinator.transport import GrpcTransport, PlacementLost
from kvferry.coordinator.turn import Blame
from kvferry.proto.v1 import worker_pb2
from kvferry.trust import handing_out
from kvferry.trust.authority import Authority
from kvferry.trust.certificates import Role
from kvferry.trust.tls_folder import TlsFolder


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a board that hangs: its kernel takes connections, and nobody says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def test_a_turn_that_waits_for_a_silent_node_leaves_it_though_the_certificates_change(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.trust.rereading.LOOK_SECONDS", 0.0)
    authority, folder = Authority.create(tmp_path / "ca", "test"), tmp_path / "tls"
    handing_out.issue(authority, folder, "coordinator", Role.COORDINATOR, ["127.0.0.1"], 30)
    transport = GrpcTransport(TlsFolder(folder))
    waiting = asyncio.ensure_future(anext(transport.run_turn(silent, worker_pb2.RunTurnRequest())))
    await asyncio.sleep(0.2)
    handing_out.renew(authority, folder, 30)
    await transport.stop_turn("127.0.0.1:1", worker_pb2.StopTurnRequest())  # any other call takes them up
    with pytest.raises(PlacementLost, match="no connection to") as lost:
        await waiting
    assert lost.value.loss.blame is Blame.NODE
    await transport.close()
