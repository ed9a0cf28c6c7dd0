"""The registry in etcd: the contract of ``coordinator/registry.py`` for any number of coordinators at once.

Every write of a session is one transaction that first compares the revision of the session's key with the one its
author read. So of two coordinators that decide at the same time one succeeds, and the other reads again and decides
anew. Where everything lies: ``keys.py``.

An open turn belongs to the coordinator that began it, for as long as that one's lease lasts; then, to whoever claims
it first. A coordinator that lost a turn learns it when it next writes: ``TurnElsewhere``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import Final, Generic, Self, TypeVar
from uuid import uuid4

from kvferry.coordinator.errors import (
    CannotStart,
    IndexOutOfRange,
    RegistryUnavailable,
    SessionBusy,
    StaleEpoch,
    TurnElsewhere,
    TurnExists,
    UnknownSession,
    UnknownTurn,
)
from kvferry.coordinator.etcd.blobs import Blobs
from kvferry.coordinator.etcd.client import EtcdClient, absent, delete, end_of, put, unchanged_since
from kvferry.coordinator.etcd.epoch_floor import EpochFloor
from kvferry.coordinator.etcd.keys import Keys
from kvferry.coordinator.etcd.lease import CoordinatorLease
from kvferry.coordinator.etcd.meta import open_meta
from kvferry.coordinator.etcd.new_sessions import NewSessions, delete_place
from kvferry.coordinator.etcd.pixels import EtcdPixels, PixelUse
from kvferry.coordinator.etcd.records import (
    CoordinatorRecord,
    OpenTurn,
    StoredAnswer,
    pack,
    unpack,
)
from kvferry.coordinator.etcd.sessions import EtcdSessions, Seen
from kvferry.coordinator.registry import (
    NO_PIXELS,
    PageKey,
    RegistryCounts,
    SessionRecord,
    TokenArray,
    TurnOutcome,
    TurnRecord,
    pictures_of,
    tokens_of,
)
from kvferry.proto.etcd import rpc_pb2
from kvferry.trust.tls_folder import TlsFolder

T = TypeVar("T")

MAX_TRIES: Final = 16
"""Of a write that others get in the way of; two coordinators rarely write one session at once."""

LEASE_SECONDS: Final = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """A transaction on a session, and what to return when it is through."""

    result: T
    changes: Sequence[rpc_pb2.RequestOp]
    # Beside that the session is as it was seen.
    conditions: Sequence[rpc_pb2.Compare] = ()


class EtcdRegistry:
    """A ``Registry``. Methods may be called from any task of one event loop."""

    is_shared = True

    def __init__(
        self, endpoints: Sequence[str], prefix: str, lease_seconds: int = LEASE_SECONDS, tls: TlsFolder | None = None
    ) -> None:
        """``endpoints``: HOST:PORT of etcd's members. ``prefix``: of all keys of this fleet. ``tls``: for it."""
        self._etcd = EtcdClient(endpoints, tls)
        self._keys = Keys(prefix)
        blobs = Blobs(self._etcd, self._keys)
        self._sessions = EtcdSessions(self._etcd, self._keys, blobs)
        self._pixels = EtcdPixels(self._etcd, self._keys, blobs)
        self._epoch_floor = EpochFloor(self._etcd, self._keys.epoch_floor)
        self._new_sessions = NewSessions(self._etcd, self._keys, self._sessions, self._pixels, self._epoch_floor)
        self.instance_id = uuid4().hex
        self._lease = CoordinatorLease(self._etcd, self._keys, self.instance_id, lease_seconds)
        self.coordinator_id = ""
        self.generation = 0
        self.is_new = False

    async def open(self, new_coordinator_id: str, *, first_generation: int = 1, generation_at_least: int = 0) -> Self:
        """Find or make the registry. All that open it have one generation; the operator's word can raise it.

        Raises CannotStart, StateIncompatible.
        """
        try:
            opening = await open_meta(
                self._etcd, self._keys.meta, new_coordinator_id, first_generation, generation_at_least
            )
            self.coordinator_id, self.generation = opening.meta.coordinator_id, opening.meta.generation
            self.is_new = opening.is_new
            await self._lease.begin()
        except RegistryUnavailable as e:
            await self.close()
            raise CannotStart(str(e)) from e
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        await self._lease.end()
        await self._etcd.close()

    # Among several coordinators.

    async def announce(self, address: str) -> None:
        await self._lease.announce(address)

    async def keeps_house(self) -> bool:
        return await self._lease.has_duty()

    async def claim_turn(self, session_id: str, turn_id: str) -> None:
        async def plan(seen: Seen) -> Change[None]:
            open_turn = self._open_turn(seen, turn_id)
            conditions = await self._conditions_of_owning(session_id, open_turn)
            claimed = self._put_open(session_id, dataclasses.replace(open_turn, owner=self.instance_id))
            # The session is written as it is, or whoever had the turn would not notice.
            return Change(None, [claimed, *self._session_changes(seen)], conditions)

        await self._change(session_id, plan)

    async def _conditions_of_owning(self, session_id: str, open_turn: OpenTurn) -> list[rpc_pb2.Compare]:
        """None when the turn is ours already. Raises TurnElsewhere while another one has it and lives."""
        if open_turn.owner == self.instance_id:
            return []
        key = self._keys.coordinator(open_turn.owner)
        (found,), _ = await self._etcd.snapshot((key, b""))
        if found:
            raise TurnElsewhere(session_id, open_turn.turn_id, unpack(CoordinatorRecord, found[0].value).address)
        return [absent(key)]

    # Sessions.

    async def create_session(self, session: SessionRecord) -> SessionRecord:
        return await self.import_session(session, ())

    async def get_session(self, session_id: str) -> SessionRecord:
        return (await self._sessions.see(session_id)).record

    async def list_sessions(self, limit: int, after: PageKey | None) -> list[SessionRecord]:
        end = self._keys.use(after.updated_at_ms, after.session_id) if after else end_of(self._keys.uses)
        page = await self._sessions.in_order(self._keys.uses, end, limit=limit, newest_first=True)
        return await self._sessions.several([session_id for _, session_id in page])

    async def expired_sessions(self, now_ms: int, before_ms: int, limit: int) -> list[str]:
        unused = await self._not_open(self._keys.uses, self._keys.use(before_ms, ""), limit)
        due = await self._not_open(self._keys.expiries, self._keys.expiry(now_ms, ""), limit)
        return list(dict.fromkeys([*unused, *due]))[:limit]

    async def _not_open(self, start: bytes, end: bytes, limit: int) -> list[str]:
        """Sessions without an open turn, of those with keys of an order between."""
        found: list[str] = []
        while len(found) < limit:
            page = await self._sessions.in_order(start, end, limit=limit)
            if not page:
                break
            records = await self._sessions.several([session_id for _, session_id in page])
            found += [record.session_id for record in records if not record.open_turn_id]
            start = page[-1][0] + b"\0"
        return found[:limit]

    async def fork_session(
        self, session_id: str, fork: SessionRecord, n_turns: int | None, last_outcome: TurnOutcome | None = None
    ) -> SessionRecord:
        seen = await self._sessions.see(session_id)
        kept = [t for t in await self._all_turns(seen) if t.outcome is not None and t.outcome.kept]
        if n_turns is not None and n_turns > len(kept):
            raise IndexOutOfRange(f"session {session_id} has {len(kept)} finished turns, not {n_turns}")
        copied = kept[:n_turns]
        if copied and last_outcome is not None:
            copied[-1] = dataclasses.replace(copied[-1], outcome=last_outcome)
        made = dataclasses.replace(
            fork, model=seen.record.model, tokenizer_digest=seen.record.tokenizer_digest, tenant=seen.record.tenant,
            n_tokens=len(tokens_of(copied)), n_turns=len(copied), forked_from=session_id,
            expires_after_s=seen.record.expires_after_s,
        )  # fmt: skip
        return await self.import_session(made, copied)

    async def import_session(
        self, session: SessionRecord, turns: Sequence[TurnRecord], pixels: Mapping[str, bytes] = NO_PIXELS
    ) -> SessionRecord:
        return await self._new_sessions.make(session, turns, pixels)

    async def delete_session(self, session_id: str) -> None:
        async def plan(seen: Seen) -> Change[list[PixelUse]]:
            if open_turn_id := seen.record.open_turn_id:
                raise SessionBusy(f"session {session_id} has an open turn, {open_turn_id}: cancel it first")
            conditions, raises_floor = await self._epoch_floor.raised_to(seen.record.epoch)
            changes = [
                delete(self._keys.session(session_id)),
                *map(delete, self._sessions.places_in_order(seen.record)),
                *delete_place(self._keys, seen.place),
                *raises_floor,
            ]
            uses = await self._pixels.uses(seen.place, pictures_of(await self._all_turns(seen)))
            return Change(uses, changes, conditions)

        uses = await self._change(session_id, plan)
        await self._pixels.drop_uses(uses)

    async def session_tokens(self, session_id: str) -> TokenArray:
        return tokens_of(await self.list_turns(session_id))

    # Turns.

    async def list_turns(self, session_id: str) -> list[TurnRecord]:
        return await self._all_turns(await self._sessions.see(session_id))

    async def session_and_turns(self, session_id: str) -> tuple[SessionRecord, list[TurnRecord]]:
        seen = await self._sessions.see(session_id)
        return seen.record, await self._all_turns(seen)

    async def _all_turns(self, seen: Seen) -> list[TurnRecord]:
        return [turn.record for turn in await self._sessions.turns(seen)]

    async def get_turn(self, session_id: str, turn_id: str) -> TurnRecord:
        return await self._sessions.named(session_id, turn_id)

    async def open_turns(self, known: Container[tuple[str, str]] = ()) -> list[TurnRecord]:
        others = await self._lease.living() - {self.instance_id}
        found: list[TurnRecord] = []
        for session_id, open_turn in (await self._sessions.all_open()).items():
            if open_turn.owner in others or (session_id, open_turn.turn_id) in known:
                continue
            try:
                record = await self._sessions.named(session_id, open_turn.turn_id)
            except (UnknownSession, UnknownTurn):  # gone since it was listed
                continue
            if record.outcome is None:
                found.append(record)
        return sorted(found, key=lambda t: (t.created_at_ms, t.session_id))

    async def begin_turn(self, turn: TurnRecord, pixels: Mapping[str, bytes] = NO_PIXELS, fingerprint: str = "") -> int:
        if not turn.pictures:
            return await self._begin_turn(turn, fingerprint)
        place = (await self._sessions.see(turn.session_id)).place  # before anything is written for it
        uses = await self._pixels.keep(place, pictures_of([turn]), pixels)
        try:
            return await self._begin_turn(turn, fingerprint, place)
        except (TurnExists, SessionBusy, UnknownSession):
            await self._pixels.drop_uses(uses)
            raise

    async def _begin_turn(self, turn: TurnRecord, fingerprint: str, place: str = "") -> int:
        """``place``: of the session that its pictures were kept for; another one may have its name by now."""

        async def plan(seen: Seen) -> Change[int]:
            if place not in ("", seen.place):
                raise UnknownSession(f"session {turn.session_id} was deleted as the turn began")
            await self._sessions.check_beginning(seen, turn)
            position = seen.stored.n_begun
            epoch = seen.record.epoch + 1 if fingerprint else 0
            opened = OpenTurn(
                turn_id=turn.turn_id, position=position, n_new_tokens=len(turn.prompt_ids), owner=self.instance_id,
                epoch=epoch, fingerprint=fingerprint,
            )  # fmt: skip
            changes = [
                await self._sessions.request_change(seen.place, position, turn),
                put(self._keys.turn_id(seen.place, turn.turn_id), b"%d" % position),
                self._put_open(turn.session_id, opened),
                *self._session_changes(
                    seen, n_begun=position + 1, open_turn_id=turn.turn_id, updated_at_ms=turn.created_at_ms,
                    epoch=epoch or seen.record.epoch,
                ),
            ]  # fmt: skip
            return Change(epoch, changes)

        return await self._change(turn.session_id, plan)

    async def pixels(self, content_hashes: Iterable[str]) -> dict[str, bytes]:
        return await self._pixels.read(content_hashes)

    async def place_turn(self, session_id: str, turn_id: str, fingerprint: str) -> int:
        async def plan(seen: Seen) -> Change[int]:
            open_turn = self._open_turn(seen, turn_id)
            conditions = await self._conditions_of_owning(session_id, open_turn)
            epoch = seen.record.epoch + 1
            placed = dataclasses.replace(open_turn, owner=self.instance_id, epoch=epoch, fingerprint=fingerprint)
            return Change(
                epoch, [self._put_open(session_id, placed), *self._session_changes(seen, epoch=epoch)], conditions
            )

        return await self._change(session_id, plan)

    async def finish_turn(
        self, session_id: str, turn_id: str, epoch: int, outcome: TurnOutcome, placements: Sequence[bytes], now_ms: int
    ) -> None:
        async def plan(seen: Seen) -> Change[None]:
            open_turn = self._open_turn(seen, turn_id)
            conditions = await self._conditions_of_owning(session_id, open_turn)
            if open_turn.epoch != epoch:
                raise StaleEpoch(f"turn {turn_id} of session {session_id} is at epoch {open_turn.epoch}, not {epoch}")
            answer = StoredAnswer(
                outcome=outcome, epoch=epoch, fingerprint=open_turn.fingerprint, placements=tuple(placements)
            )
            n_new_tokens = open_turn.n_new_tokens + len(outcome.answer_ids) if outcome.kept else 0
            changes = [
                await self._sessions.answer_change(seen.place, open_turn.position, answer),
                delete(self._keys.open_turn(session_id)),
                *self._session_changes(
                    seen, open_turn_id="", updated_at_ms=now_ms, n_tokens=seen.record.n_tokens + n_new_tokens,
                    n_turns=seen.record.n_turns + outcome.kept,
                ),
            ]  # fmt: skip
            return Change(None, changes, conditions)

        await self._change(session_id, plan)

    async def list_placements(self, session_id: str) -> dict[str, list[bytes]]:
        turns = await self._sessions.turns(await self._sessions.see(session_id))
        return {turn.record.turn_id: list(turn.placements) for turn in turns if turn.placements}

    async def counts(self) -> RegistryCounts:
        n_sessions, n_open_turns = [
            (await self._etcd.range(prefix, end_of(prefix), count_only=True)).count
            for prefix in (self._keys.sessions, self._keys.open_turns)
        ]
        return RegistryCounts(n_sessions=n_sessions, n_open_turns=n_open_turns)

    # How a session is written.

    async def _change(self, session_id: str, plan: Callable[[Seen], Awaitable[Change[T]]]) -> T:
        """Do what is planned for the session as it is; plan anew for as long as others write it first.

        Raises UnknownSession, and what ``plan`` raises.
        """
        for _ in range(MAX_TRIES):
            seen = await self._sessions.see(session_id)
            change = await plan(seen)
            unchanged = unchanged_since(self._keys.session(session_id), seen.written_at)
            if await self._etcd.commit([unchanged, *change.conditions], change.changes):
                return change.result
        raise RegistryUnavailable(f"others write session {session_id} all the time: ask again")

    def _session_changes(self, seen: Seen, n_begun: int | None = None, **fields: object) -> list[rpc_pb2.RequestOp]:
        """The session with other ``fields`` of its record, and its place in the order of last use."""
        record = dataclasses.replace(seen.record, **fields)  # type: ignore[arg-type]
        n_begun = seen.stored.n_begun if n_begun is None else n_begun
        stored = dataclasses.replace(seen.stored, record=record, n_begun=n_begun)
        changes = [put(self._keys.session(record.session_id), pack(stored))]
        if record.updated_at_ms != seen.record.updated_at_ms:
            changes += map(delete, self._sessions.places_in_order(seen.record))
            changes += [put(place, b"") for place in self._sessions.places_in_order(record)]
        return changes

    def _put_open(self, session_id: str, open_turn: OpenTurn) -> rpc_pb2.RequestOp:
        return put(self._keys.open_turn(session_id), pack(open_turn))

    def _open_turn(self, seen: Seen, turn_id: str) -> OpenTurn:
        """Raises UnknownTurn when it is not open."""
        if seen.open_turn is None or seen.open_turn.turn_id != turn_id:
            raise UnknownTurn(f"session {seen.record.session_id} has no open turn {turn_id}")
        return seen.open_turn
