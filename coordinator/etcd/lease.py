"""A coordinator's own key in etcd, which is there for as long as the coordinator lives, and its housekeeping duty.

Nothing is correct because of a lease: epochs fence (``registry.py``). A lease says whose turns may be taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from kvferry.coordinator.errors import RegistryUnavailable
from kvferry.coordinator.etcd.client import EtcdClient, absent, delete, put
from kvferry.coordinator.etcd.keys import Keys, last_part
from kvferry.coordinator.etcd.records import CoordinatorRecord, pack, unpack
from kvferry.proto.etcd import rpc_pb2

logger = logging.getLogger(__name__)

BEATS: Final = 3
"""Renewals in one lease; two may fail."""


class CoordinatorLease:
    """Begin it once, then ``run`` for ever; ``end`` lets others take over at once."""

    def __init__(self, etcd: EtcdClient, keys: Keys, instance_id: str, seconds: int) -> None:
        self._etcd = etcd
        self._keys = keys
        self._instance_id = instance_id
        self._seconds = seconds
        self._lease_id = 0
        self._address = ""
        self._beating: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Raises RegistryUnavailable."""
        await self._renew()
        self._beating = asyncio.create_task(self._run(), name="coordinator lease")

    async def announce(self, address: str) -> None:
        """Say where this coordinator serves. Whoever is said to serve there has ended: an address has one holder."""
        self._address = address
        others = await self._etcd.all_in(self._keys.coordinators)
        gone = [
            kv.key
            for kv in others
            if last_part(kv.key) != self._instance_id and unpack(CoordinatorRecord, kv.value).address == address
        ]
        await self._etcd.commit([], [self._own_key(), *map(delete, gone)])

    async def living(self) -> set[str]:
        """The instances of all coordinators whose lease lasts."""
        return {last_part(kv.key) for kv in await self._etcd.all_in(self._keys.coordinators)}

    async def has_duty(self) -> bool:
        """Whether this coordinator does the housekeeping; it stands for election when nobody does."""
        (found,), _ = await self._etcd.snapshot((self._keys.duty, b""))
        if found:
            return found[0].value.decode() == self._instance_id
        duty = put(self._keys.duty, self._instance_id.encode(), self._lease_id)
        return bool(await self._etcd.commit([absent(self._keys.duty)], [duty]))

    async def end(self) -> None:
        """Never raises: what is not revoked ends by itself."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._lease_id:
            with contextlib.suppress(RegistryUnavailable):
                await self._etcd.revoke(self._lease_id)

    async def _run(self) -> None:
        told = False
        while True:
            await asyncio.sleep(self._seconds / BEATS)
            try:
                await self._renew()
                told = False
            except RegistryUnavailable as e:
                if not told:
                    logger.warning("this coordinator's lease in etcd is not renewed, trying on: %s", e)
                told = True

    async def _renew(self) -> None:
        if self._lease_id and await self._etcd.keep_alive(self._lease_id):
            return
        if self._lease_id:
            logger.warning("this coordinator's lease in etcd had ended: its turns may have been taken over")
        self._lease_id = await self._etcd.grant(self._seconds)
        await self._etcd.commit([], [self._own_key()])

    def _own_key(self) -> rpc_pb2.RequestOp:
        record = pack(CoordinatorRecord(address=self._address))
        return put(self._keys.coordinator(self._instance_id), record, self._lease_id)
