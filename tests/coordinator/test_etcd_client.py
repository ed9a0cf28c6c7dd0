"""What calls to several members of etcd do when one of them fails."""

from __future__ import annotations

import asyncio
import socket

from etcd_cluster import EtcdCluster

from kvferry.coordinator.etcd.client import EtcdClient, put


async def test_calls_that_meet_a_silent_member_together_all_go_to_one_that_answers(etcd: EtcdCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        client = EtcdClient([f"127.0.0.1:{silent.getsockname()[1]}", *etcd.endpoints])
        keys = [b"together/%d" % number for number in range(4)]
        written = await asyncio.gather(*(client.commit([], [put(key, b"")]) for key in keys), return_exceptions=True)
        await client.close()
    assert [type(revision) for revision in written] == [int] * 4
