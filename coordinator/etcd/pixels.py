"""Pixels of pictures in etcd: once for each content, for as long as something has use of them.

Each turn that is to begin, and each session that is to begin with turns, has uses of its own, and takes them back when
it may not: of coordinators that begin turns, or make sessions of one name, at once, none takes anything from another,
and none leaves its uses to another. A picture's key is written again with every use, and compared by whoever drops it
after its last one: a use that came in between is not overlooked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from uuid import uuid4

from kvferry.coordinator.etcd.blobs import Blobs
from kvferry.coordinator.etcd.client import EtcdClient, absent, delete, delete_all_in, end_of, put, unchanged_since
from kvferry.coordinator.etcd.keys import Keys
from kvferry.coordinator.etcd.records import PixelsRecord, pack, unpack

PLACE: Final = "pixels"
"""Of all their blobs; no session's place is named so."""


class PixelUse(NamedTuple):
    """That something shows a picture; nobody else has this key."""

    content_hash: str
    key: bytes


class EtcdPixels:
    """Part of ``EtcdRegistry``."""

    def __init__(self, etcd: EtcdClient, keys: Keys, blobs: Blobs) -> None:
        self._etcd = etcd
        self._keys = keys
        self._blobs = blobs

    async def keep(self, place: str, content_hashes: Iterable[str], pixels: Mapping[str, bytes]) -> list[PixelUse]:
        """Something in a session's place has use of these from now on; returns the uses, for ``drop_uses``.

        ``pixels`` are written if they are not there. What is neither there nor given is passed over.
        """
        writer = uuid4().hex
        kept = []
        for content_hash in dict.fromkeys(content_hashes):
            use = PixelUse(content_hash, self._keys.pixel_use(content_hash, place, writer))
            if await self._keep_one(use, pixels.get(content_hash)):
                kept.append(use)
        return kept

    async def _keep_one(self, use: PixelUse, png: bytes | None) -> bool:
        """False for pixels that are neither there nor given."""
        key, put_use = self._keys.pixels(use.content_hash), put(use.key, b"")
        while True:
            (found,), _ = await self._etcd.snapshot((key, b""))
            if found:
                condition = unchanged_since(key, found[0].mod_revision)
                if await self._etcd.commit([condition], [put(key, found[0].value), put_use]):
                    return True
            elif png is not None:
                blob = await self._blobs.write(PLACE, png)
                if await self._etcd.commit([absent(key)], [put(key, pack(PixelsRecord(blob=blob))), put_use]):
                    return True
                await self._blobs.drop(PLACE, blob.blob_id)
            else:
                return False

    async def read(self, content_hashes: Iterable[str]) -> dict[str, bytes]:
        names = list(dict.fromkeys(content_hashes))
        found = await asyncio.gather(*map(self._read_one, names))
        return {name: png for name, png in zip(names, found, strict=True) if png is not None}

    async def _read_one(self, content_hash: str) -> bytes | None:
        (found,), _ = await self._etcd.snapshot((self._keys.pixels(content_hash), b""))
        return await self._blobs.read(PLACE, unpack(PixelsRecord, found[0].value).blob) if found else None

    async def uses(self, place: str, content_hashes: Iterable[str]) -> list[PixelUse]:
        """Those of these pictures in a session's place."""
        found = []
        for content_hash in dict.fromkeys(content_hashes):
            keys = await self._etcd.all_in(self._keys.pixel_uses_in(content_hash, place))
            found += [PixelUse(content_hash, used.key) for used in keys]
        return found

    async def drop_uses(self, uses: Iterable[PixelUse]) -> None:
        """They are no more; what nothing has use of goes."""
        for content_hash, key in uses:
            await self._etcd.commit([], [delete(key)])
            await self._drop_unused(content_hash)

    async def _drop_unused(self, content_hash: str) -> None:
        key, uses = self._keys.pixels(content_hash), self._keys.pixel_uses(content_hash)
        (found, used), _ = await self._etcd.snapshot((key, b""), (uses, end_of(uses)))
        if not found or used:
            return
        blob = unpack(PixelsRecord, found[0].value).blob
        # when it fails, somebody began to use them
        await self._etcd.commit(
            [unchanged_since(key, found[0].mod_revision)],
            [delete(key), delete_all_in(self._keys.blob(PLACE, blob.blob_id))],
        )
