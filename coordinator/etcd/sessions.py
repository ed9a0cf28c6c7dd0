"""Reading sessions and turns from etcd, and putting records together from their parts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Final

from kvferry.coordinator.errors import RegistryUnavailable, SessionBusy, TurnExists, UnknownSession, UnknownTurn
from kvferry.coordinator.etcd.blobs import Blobs
from kvferry.coordinator.etcd.client import EtcdClient, put
from kvferry.coordinator.etcd.keys import Keys, last_part
from kvferry.coordinator.etcd.records import OpenTurn, StoredAnswer, StoredSession, pack, unpack
from kvferry.coordinator.registry import SessionRecord, TurnRecord
from kvferry.proto.etcd import rpc_pb2

UNPACK_HERE_BYTES: Final = 64 << 10
"""More than this is unpacked in a thread: some milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A session as of one moment."""

    stored: StoredSession
    # Of its last write, for comparing; of the whole store, for reading more as of the same moment.
    written_at: int
    revision: int
    open_turn: OpenTurn | None

    @property
    def record(self) -> SessionRecord:
        return self.stored.record

    @property
    def place(self) -> str:
        return self.stored.place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTurn:
    """A turn, with where it had been."""

    record: TurnRecord
    placements: tuple[bytes, ...] = ()


class EtcdSessions:
    """The reading part of ``EtcdRegistry``."""

    def __init__(self, etcd: EtcdClient, keys: Keys, blobs: Blobs) -> None:
        self._etcd = etcd
        self._keys = keys
        self._blobs = blobs

    async def see(self, session_id: str) -> Seen:
        """Raises UnknownSession."""
        session_key, open_key = self._keys.session(session_id), self._keys.open_turn(session_id)
        (sessions, opened), revision = await self._etcd.snapshot((session_key, b""), (open_key, b""))
        if not sessions:
            raise UnknownSession(f"there is no session {session_id}")
        return Seen(
            stored=unpack(StoredSession, sessions[0].value),
            written_at=sessions[0].mod_revision,
            revision=revision,
            open_turn=unpack(OpenTurn, opened[0].value) if opened else None,
        )

    async def several(self, session_ids: Sequence[str]) -> list[SessionRecord]:
        """Those of them that are there."""
        keys = [(self._keys.session(session_id), b"") for session_id in session_ids]
        found: list[SessionRecord] = []
        for start in range(0, len(keys), 100):
            results, _ = await self._etcd.snapshot(*keys[start : start + 100])
            found += [unpack(StoredSession, kvs[0].value).record for kvs in results if kvs]
        return found

    async def turns(self, seen: Seen) -> list[KeptTurn]:
        """All of the session's, in order."""
        prefix = self._keys.turns(seen.place)
        values: dict[str, dict[str, bytes]] = {}
        for kv in await self._etcd.all_in(prefix, seen.revision):
            position, part = kv.key[len(prefix) :].decode().split("/")
            values.setdefault(position, {})[part] = await self._blobs.fetch(seen.place, kv.value)
        n_bytes = sum(len(value) for parts in values.values() for value in parts.values())

        def unpacked() -> list[KeptTurn]:
            return [_turn_of(seen, int(position), parts) for position, parts in sorted(values.items())]

        return await asyncio.to_thread(unpacked) if n_bytes > UNPACK_HERE_BYTES else unpacked()

    async def turn(self, seen: Seen, position: int) -> TurnRecord:
        keys = (self._keys.request(seen.place, position), self._keys.answer(seen.place, position))
        (request, answer), _ = await self._etcd.snapshot(*((key, b"") for key in keys))
        if not request:
            raise RegistryUnavailable(f"session {seen.record.session_id} was deleted while it was read: ask again")
        parts = {"request": await self._blobs.fetch(seen.place, request[0].value)}
        if answer:
            parts["answer"] = await self._blobs.fetch(seen.place, answer[0].value)
        return _turn_of(seen, position, parts).record

    async def position(self, seen: Seen, turn_id: str) -> int | None:
        (found,), _ = await self._etcd.snapshot((self._keys.turn_id(seen.place, turn_id), b""))
        return int(found[0].value) if found else None

    async def named(self, session_id: str, turn_id: str) -> TurnRecord:
        """The turn, or the latest for an empty id. Raises UnknownSession, UnknownTurn."""
        seen = await self.see(session_id)
        position = await self.position(seen, turn_id) if turn_id else seen.stored.n_begun - 1
        if position is None:
            raise UnknownTurn(f"session {session_id} has no turn {turn_id}")
        if position < 0:
            raise UnknownTurn(f"session {session_id} has no turn yet")
        return await self.turn(seen, position)

    async def check_beginning(self, seen: Seen, turn: TurnRecord) -> None:
        """That the turn may begin. Raises TurnExists, SessionBusy."""
        record = seen.record
        if await self.position(seen, turn.turn_id) is not None:
            raise TurnExists(f"session {turn.session_id} has a turn {turn.turn_id} already")
        if record.open_turn_id:
            raise SessionBusy(
                f"session {turn.session_id} is answering turn {record.open_turn_id}: wait for it or cancel it"
            )
        if record.n_tokens != turn.n_history_tokens:
            raise SessionBusy(
                f"session {turn.session_id} grew from {turn.n_history_tokens} to {record.n_tokens} tokens meanwhile: "
                "ask again"
            )

    async def all_open(self) -> dict[str, OpenTurn]:
        """By session."""
        found = await self._etcd.all_in(self._keys.open_turns)
        return {last_part(kv.key): unpack(OpenTurn, kv.value) for kv in found}

    async def in_order(
        self, start: bytes, end: bytes, *, limit: int, newest_first: bool = False
    ) -> list[tuple[bytes, str]]:
        """Keys and sessions in order of last use or expiry, of those with a key between."""
        page = await self._etcd.range(start, end, limit=limit, descending=newest_first, keys_only=True)
        return [(kv.key, last_part(kv.key)) for kv in page.kvs]

    # What a write of a session or a turn consists of.

    def places_in_order(self, record: SessionRecord) -> list[bytes]:
        """The keys under which a session is found by its last use, and by its expiry if it has one."""
        keys = [self._keys.use(record.updated_at_ms, record.session_id)]
        if record.expires_at_ms:
            keys.append(self._keys.expiry(record.expires_at_ms, record.session_id))
        return keys

    async def request_change(self, place: str, position: int, turn: TurnRecord) -> rpc_pb2.RequestOp:
        as_begun = dataclasses.replace(turn, outcome=None, epoch=0, fingerprint="")
        return put(self._keys.request(place, position), await self._blobs.put_away(place, pack(as_begun)))

    async def answer_change(self, place: str, position: int, answer: StoredAnswer) -> rpc_pb2.RequestOp:
        return put(self._keys.answer(place, position), await self._blobs.put_away(place, pack(answer)))


def _turn_of(seen: Seen, position: int, parts: dict[str, bytes]) -> KeptTurn:
    """From its request, its answer if it has one, and the open turn if it is that."""
    begun = dataclasses.replace(unpack(TurnRecord, parts["request"]), session_id=seen.record.session_id)
    if "answer" in parts:
        answer = unpack(StoredAnswer, parts["answer"])
        record = dataclasses.replace(begun, outcome=answer.outcome, epoch=answer.epoch, fingerprint=answer.fingerprint)
        return KeptTurn(record=record, placements=answer.placements)
    if seen.open_turn is not None and seen.open_turn.position == position:
        begun = dataclasses.replace(begun, epoch=seen.open_turn.epoch, fingerprint=seen.open_turn.fingerprint)
    return KeptTurn(record=begun)
