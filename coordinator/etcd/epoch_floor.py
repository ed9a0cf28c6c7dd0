"""The highest epoch of the sessions that were deleted; a new one begins no lower (``coordinator/registry.py``)."""

from __future__ import annotations

from kvferry.coordinator.etcd.client import EtcdClient, absent, put, unchanged_since
from kvferry.proto.etcd import rpc_pb2


class EpochFloor:
    """One number under one key. All methods raise RegistryUnavailable."""

    def __init__(self, etcd: EtcdClient, key: bytes) -> None:
        self._etcd = etcd
        self._key = key

    async def read(self) -> tuple[int, rpc_pb2.Compare]:
        """The number, and the condition that it is still this one."""
        (found,), _ = await self._etcd.snapshot((self._key, b""))
        if not found:
            return 0, absent(self._key)
        return int(found[0].value), unchanged_since(self._key, found[0].mod_revision)

    async def raised_to(self, epoch: int) -> tuple[list[rpc_pb2.Compare], list[rpc_pb2.RequestOp]]:
        """What a transaction consists of, beside its own, that deletes a session of this epoch."""
        floor, unchanged = await self.read()
        return ([], []) if epoch <= floor else ([unchanged], [put(self._key, b"%d" % epoch)])
