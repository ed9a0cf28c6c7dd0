"""Promise 35: two workers cannot share a port. The second one says so and ends, twenty times of twenty."""

from __future__ import annotations

import pytest

from kvferry.engine.cores import choose_cores
from kvferry.node.config import NodeConfig
from kvferry.node.errors import PortInUse
from kvferry.node.process import Node


def node_at(listen: str, node_id: str) -> Node:
    return Node(NodeConfig(model="unused", node_id=node_id, listen=listen), choose_cores())


@pytest.mark.parametrize("looks_first", [True, False], ids=["as it is", "both at the same moment"])
async def test_the_second_worker_on_a_port_does_not_start(monkeypatch: pytest.MonkeyPatch, looks_first: bool) -> None:
    """Whoever looks before it binds may look at the moment before the first one binds: then gRPC itself refuses."""
    first = node_at("127.0.0.1:0", "first")
    address = await first._listen()
    if not looks_first:
        monkeypatch.setattr("kvferry.node.process.why_not_listen", lambda _: None)
    refused = 0
    for number in range(10):
        second = node_at(address, f"second-{number}")
        with pytest.raises(PortInUse) as told:
            await second._listen()
        assert str(told.value).startswith(f"cannot listen at {address}: ")
        assert "give another --listen" in str(told.value)
        refused += 1
    assert refused == 10
    await first._server.stop(0)
    third = node_at(address, "third")
    assert await third._listen() == address, "the port is free again"
    await third._server.stop(0)
