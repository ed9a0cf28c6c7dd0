"""How a session comes to be in etcd, with the turns that it begins with: those of a fork, or of an import."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from uuid import uuid4

from kvferry.coordinator.errors import SessionExists
from kvferry.coordinator.etcd.blobs import batches
from kvferry.coordinator.etcd.client import EtcdClient, absent, delete_all_in, put
from kvferry.coordinator.etcd.epoch_floor import EpochFloor
from kvferry.coordinator.etcd.keys import Keys
from kvferry.coordinator.etcd.pixels import EtcdPixels, PixelUse
from kvferry.coordinator.etcd.records import StoredAnswer, StoredSession, pack
from kvferry.coordinator.etcd.sessions import EtcdSessions
from kvferry.coordinator.registry import SessionRecord, TurnRecord, pictures_of
from kvferry.proto.etcd import rpc_pb2


class NewSessions:
    """A part of ``EtcdRegistry``. The session's own key comes last: without it the rest belongs to nobody."""

    def __init__(
        self, etcd: EtcdClient, keys: Keys, sessions: EtcdSessions, pixels: EtcdPixels, epoch_floor: EpochFloor
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._sessions = sessions
        self._pixels = pixels
        self._epoch_floor = epoch_floor

    async def make(
        self, session: SessionRecord, turns: Sequence[TurnRecord], pixels: Mapping[str, bytes]
    ) -> SessionRecord:
        """Returns it as it begins. Raises SessionExists, RegistryUnavailable."""
        stored = StoredSession(record=session, place=uuid4().hex, n_begun=len(turns))
        uses: list[PixelUse] = []
        if turns:
            await self._check_absent(session.session_id)  # before anything is written for it
            uses = await self._pixels.keep(stored.place, pictures_of(turns), pixels)
            for batch in batches([change async for change in self._turn_changes(stored.place, turns)]):
                await self._etcd.commit([], batch)
        try:
            return await self._put(stored)
        except SessionExists:
            await self._etcd.commit([], delete_place(self._keys, stored.place))
            await self._pixels.drop_uses(uses)
            raise

    async def _put(self, stored: StoredSession) -> SessionRecord:
        record = stored.record
        key = self._keys.session(record.session_id)
        places = [put(place, b"") for place in self._sessions.places_in_order(record)]
        while True:  # until nobody deletes a session meanwhile that raises the floor
            floor, is_still_so = await self._epoch_floor.read()
            begun = dataclasses.replace(record, epoch=max(record.epoch, floor))
            put_session = put(key, pack(dataclasses.replace(stored, record=begun)))
            if await self._etcd.commit([absent(key), is_still_so], [put_session, *places]):
                return begun
            await self._check_absent(record.session_id)

    async def _check_absent(self, session_id: str) -> None:
        """Raises SessionExists."""
        (found,), _ = await self._etcd.snapshot((self._keys.session(session_id), b""))
        if found:
            raise SessionExists(f"there is a session {session_id} already")

    async def _turn_changes(self, place: str, turns: Sequence[TurnRecord]) -> AsyncIterator[rpc_pb2.RequestOp]:
        for position, turn in enumerate(turns):
            yield put(self._keys.turn_id(place, turn.turn_id), b"%d" % position)
            yield await self._sessions.request_change(place, position, turn)
            if turn.outcome is not None:
                answer = StoredAnswer(outcome=turn.outcome, epoch=turn.epoch, fingerprint=turn.fingerprint)
                yield await self._sessions.answer_change(place, position, answer)


def delete_place(keys: Keys, place: str) -> list[rpc_pb2.RequestOp]:
    """All that lies in the place of a session."""
    return [delete_all_in(p) for p in (keys.turns(place), keys.turn_ids(place), keys.blobs(place))]
