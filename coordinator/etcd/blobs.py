"""Values of any length: a short one stands in its key, a long one lies in pieces that its key refers to.

etcd takes 1.5 MiB in one request. Pieces are written before the key that refers to them, under a name that nobody else
uses: until that key is there, they do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final
from uuid import uuid4

from kvferry.coordinator.errors import RegistryUnavailable
from kvferry.coordinator.etcd.client import EtcdClient, delete_all_in, put
from kvferry.coordinator.etcd.keys import Keys
from kvferry.coordinator.etcd.records import BlobReference, pack, unpack
from kvferry.proto.etcd import rpc_pb2

PIECE_BYTES: Final = 512 << 10
"""Two of these and some small keys make a request that etcd takes."""

BATCH_BYTES: Final = 1 << 20
BATCH_CHANGES: Final = 100
"""etcd takes 128 changes in one transaction."""

AT_ONCE: Final = 4
"""Pieces written at the same time."""

_HERE, _ELSEWHERE = b"=", b">"


class Blobs:
    """Values below one prefix of keys."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys

    async def put_away(self, place: str, packed: bytes) -> bytes:
        """What to write as the key's value; pieces are written by now."""
        if len(packed) <= PIECE_BYTES:
            return _HERE + packed
        return _ELSEWHERE + pack(await self.write(place, packed))

    async def fetch(self, place: str, value: bytes) -> bytes:
        """What ``put_away`` was given. Raises RegistryUnavailable for pieces that are gone: the session is, too."""
        mark, rest = value[:1], value[1:]
        return rest if mark == _HERE else await self.read(place, unpack(BlobReference, rest))

    async def write(self, place: str, content: bytes) -> BlobReference:
        reference = BlobReference(blob_id=uuid4().hex, n_bytes=len(content))
        prefix = self._keys.blob(place, reference.blob_id)
        slots = asyncio.Semaphore(AT_ONCE)

        async def write_piece(number: int) -> None:
            async with slots:
                piece = content[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
                await self._etcd.commit([], [put(prefix + b"%08d" % number, piece)])

        await asyncio.gather(*(write_piece(number) for number in range(-(-len(content) // PIECE_BYTES))))
        return reference

    async def read(self, place: str, reference: BlobReference) -> bytes:
        pieces = await self._etcd.all_in(self._keys.blob(place, reference.blob_id))
        content = b"".join(piece.value for piece in pieces)
        if len(content) != reference.n_bytes:
            raise RegistryUnavailable("a part of the session was deleted while it was read: ask again")
        return content

    async def drop(self, place: str, blob_id: str) -> None:
        await self._etcd.commit([], [delete_all_in(self._keys.blob(place, blob_id))])


def batches(changes: Iterable[rpc_pb2.RequestOp]) -> Iterable[Sequence[rpc_pb2.RequestOp]]:
    """As many changes at a time as etcd takes."""
    batch: list[rpc_pb2.RequestOp] = []
    n_bytes = 0
    for change in changes:
        size = change.ByteSize()
        if batch and (len(batch) == BATCH_CHANGES or n_bytes + size > BATCH_BYTES):
            yield batch
            batch, n_bytes = [], 0
        batch.append(change)
        n_bytes += size
    if batch:
        yield batch
