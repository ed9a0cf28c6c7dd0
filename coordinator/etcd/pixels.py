"""Pixels of pictures in etcd: once for each content, for as long as a session has use of them.

A picture's key, and that of the session's use of it, are written again whenever somebody has use of it. Whoever drops
a use, or a picture after its last one, compares them: a use that came in between is not overlooked. So of two
coordinators that begin a turn, or make a session of one name, at once, the one that comes second takes nothing away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

from kvferry.coordinator.etcd.blobs import Blobs
from kvferry.coordinator.etcd.client import EtcdClient, absent, delete, delete_all_in, end_of, put, unchanged_since
from kvferry.coordinator.etcd.keys import Keys
from kvferry.coordinator.etcd.records import PixelsRecord, pack, unpack

PLACE: Final = "pixels"
"""Of all their blobs; no session's place is named so."""


class EtcdPixels:
    """Part of ``EtcdRegistry``."""

    def __init__(self, etcd: EtcdClient, keys: Keys, blobs: Blobs) -> None:
        self._etcd = etcd
        self._keys = keys
        self._blobs = blobs

    async def keep(self, session_id: str, content_hashes: Iterable[str], pixels: Mapping[str, bytes]) -> dict[str, int]:
        """The session has use of these from now on; returns those it had none of before, for ``drop_uses``.

        ``pixels`` are written if they are not there. What is neither there nor given is passed over.
        """
        added = {}
        for content_hash in dict.fromkeys(content_hashes):
            is_new, written_at = await self._keep_one(session_id, content_hash, pixels.get(content_hash))
            if is_new:
                added[content_hash] = written_at
        return added

    async def _keep_one(self, session_id: str, content_hash: str, png: bytes | None) -> tuple[bool, int]:
        """Whether the session had no use of it before, and the revision at which it has."""
        key, use = self._keys.pixels(content_hash), self._keys.pixel_use(content_hash, session_id)
        while True:
            (found, used), _ = await self._etcd.snapshot((key, b""), (use, b""))
            if found:
                changes = [put(key, found[0].value), put(use, b"")]
                if written_at := await self._etcd.commit([unchanged_since(key, found[0].mod_revision)], changes):
                    return not used, written_at
            elif png is not None:
                blob = await self._blobs.write(PLACE, png)
                changes = [put(key, pack(PixelsRecord(blob=blob))), put(use, b"")]
                if written_at := await self._etcd.commit([absent(key)], changes):
                    return not used, written_at
                await self._blobs.drop(PLACE, blob.blob_id)
            else:
                return False, 0

    async def read(self, content_hashes: Iterable[str]) -> dict[str, bytes]:
        names = list(dict.fromkeys(content_hashes))
        found = await asyncio.gather(*map(self._read_one, names))
        return {name: png for name, png in zip(names, found, strict=True) if png is not None}

    async def _read_one(self, content_hash: str) -> bytes | None:
        (found,), _ = await self._etcd.snapshot((self._keys.pixels(content_hash), b""))
        return await self._blobs.read(PLACE, unpack(PixelsRecord, found[0].value).blob) if found else None

    async def uses(self, session_id: str, content_hashes: Iterable[str]) -> dict[str, int]:
        """The session's uses of these, as of now, for ``drop_uses``."""
        found = {}
        for content_hash in dict.fromkeys(content_hashes):
            (used,), _ = await self._etcd.snapshot((self._keys.pixel_use(content_hash, session_id), b""))
            if used:
                found[content_hash] = used[0].mod_revision
        return found

    async def drop_uses(self, session_id: str, uses: Mapping[str, int]) -> None:
        """The session has no use of these any more, unless somebody said since that it has. What no session has use of
        goes. ``uses``: by content hash, the revision at which each was written."""
        for content_hash, written_at in uses.items():
            use = self._keys.pixel_use(content_hash, session_id)
            if await self._etcd.commit([unchanged_since(use, written_at)], [delete(use)]):
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
