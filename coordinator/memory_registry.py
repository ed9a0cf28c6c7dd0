"""A registry in memory: the contract of ``registry.py`` with nothing durable. For simulations and tests.

``Ledger`` is what would be on the disk; it outlives the ``MemoryRegistry`` that a coordinator opens on it, as a file
outlives a process. The contract's tests run over it as over the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import Self

from kvferry.coordinator.errors import (
    IndexOutOfRange,
    RegistryUnavailable,
    SessionBusy,
    SessionExists,
    StaleEpoch,
    TurnElsewhere,
    TurnExists,
    UnknownSession,
    UnknownTurn,
)
from kvferry.coordinator.registry import (
    NO_PIXELS,
    PageKey,
    RegistryCounts,
    SessionRecord,
    TokenArray,
    TurnOutcome,
    TurnRecord,
    tokens_of,
)


@dataclasses.dataclass(slots=True)
class Ledger:
    """What an opened registry leaves behind."""

    coordinator_id: str = ""
    generation: int = 0
    n_openings: int = 0
    # The highest of the sessions that were deleted.
    epoch_floor: int = 0
    sessions: dict[str, SessionRecord] = dataclasses.field(default_factory=dict)
    turns: dict[str, list[TurnRecord]] = dataclasses.field(default_factory=dict)
    placements: dict[tuple[str, str], list[bytes]] = dataclasses.field(default_factory=dict)
    pixels: dict[str, bytes] = dataclasses.field(default_factory=dict)
    # Which coordinators have it open, with their addresses; which of them has a session's open turn; who keeps house.
    living: dict[str, str] = dataclasses.field(default_factory=dict)
    owners: dict[str, str] = dataclasses.field(default_factory=dict)
    duty: str = ""


async def at_once() -> None:
    """A disk that takes no time."""


class MemoryRegistry:
    """A ``Registry`` over a ledger.

    ``disk`` is awaited before and after each effect; it may take time, fail, or be cancelled. With ``is_shared``
    several may be open on one ledger; without, whoever opens it has outlived the one before.
    """

    def __init__(
        self, ledger: Ledger, disk: Callable[[], Awaitable[None]] = at_once, *, is_shared: bool = False
    ) -> None:
        self._ledger = ledger
        self._disk = disk
        self.is_shared = is_shared
        self.instance_id = ""
        self._is_open = False
        self.coordinator_id = ""
        self.generation = 0
        self.is_new = False

    async def open(self, new_coordinator_id: str) -> Self:
        ledger = self._ledger
        self.is_new = ledger.generation == 0
        ledger.coordinator_id = ledger.coordinator_id or new_coordinator_id
        if self.is_new or not self.is_shared:
            ledger.generation += 1
        if not self.is_shared:
            ledger.living.clear()
        self.instance_id = f"{ledger.coordinator_id}-{ledger.n_openings}"
        ledger.n_openings += 1
        ledger.living[self.instance_id] = ""
        self.coordinator_id, self.generation, self._is_open = ledger.coordinator_id, ledger.generation, True
        return self

    async def close(self) -> None:
        self._is_open = False
        self._ledger.living.pop(self.instance_id, None)

    async def announce(self, address: str) -> None:
        self._check_open()
        self._ledger.living[self.instance_id] = address

    async def keeps_house(self) -> bool:
        self._check_open()
        if self._ledger.duty not in self._ledger.living:
            self._ledger.duty = self.instance_id
        return self._ledger.duty == self.instance_id

    async def claim_turn(self, session_id: str, turn_id: str) -> None:
        async with _Write(self):
            self._session(session_id)
            self._claim(session_id, turn_id)

    async def create_session(self, session: SessionRecord) -> SessionRecord:
        async with _Write(self):
            return self._create(session)

    async def get_session(self, session_id: str) -> SessionRecord:
        self._check_open()
        return self._session(session_id)

    async def list_sessions(self, limit: int, after: PageKey | None) -> list[SessionRecord]:
        self._check_open()
        newest = sorted(self._ledger.sessions.values(), key=lambda s: (s.updated_at_ms, s.session_id), reverse=True)
        if after is not None:
            newest = [s for s in newest if (s.updated_at_ms, s.session_id) < (after.updated_at_ms, after.session_id)]
        return newest[:limit]

    async def fork_session(
        self, session_id: str, fork: SessionRecord, n_turns: int | None, last_outcome: TurnOutcome | None = None
    ) -> SessionRecord:
        async with _Write(self):
            parent = self._session(session_id)
            kept = self._kept(session_id)
            if n_turns is not None and n_turns > len(kept):
                raise IndexOutOfRange(f"session {session_id} has {len(kept)} finished turns, not {n_turns}")
            copied = kept[:n_turns]
            if copied and last_outcome is not None:
                copied[-1] = dataclasses.replace(copied[-1], outcome=last_outcome)
            made = dataclasses.replace(
                fork, model=parent.model, tokenizer_digest=parent.tokenizer_digest, tenant=parent.tenant,
                n_tokens=len(tokens_of(copied)), n_turns=len(copied), forked_from=session_id,
                expires_after_s=parent.expires_after_s,
            )  # fmt: skip
            begun = self._create(made)
            self._ledger.turns[made.session_id] = [dataclasses.replace(t, session_id=made.session_id) for t in copied]
            return begun

    async def import_session(
        self, session: SessionRecord, turns: Sequence[TurnRecord], pixels: Mapping[str, bytes] = NO_PIXELS
    ) -> SessionRecord:
        async with _Write(self):
            begun = self._create(session)
            self._ledger.turns[session.session_id] = list(turns)
            self._ledger.pixels |= pixels
            return begun

    async def expired_sessions(self, now_ms: int, before_ms: int, limit: int) -> list[str]:
        self._check_open()
        expired = [s for s in self._ledger.sessions.values() if s.is_expired(now_ms, before_ms)]
        return [s.session_id for s in sorted(expired, key=lambda s: (s.updated_at_ms, s.session_id))[:limit]]

    async def delete_session(self, session_id: str) -> None:
        async with _Write(self):
            if open_turn_id := self._session(session_id).open_turn_id:
                raise SessionBusy(f"session {session_id} has an open turn, {open_turn_id}: cancel it first")
            for turn in self._ledger.turns.pop(session_id):
                self._ledger.placements.pop((session_id, turn.turn_id), None)
            gone = self._ledger.sessions.pop(session_id)
            self._ledger.epoch_floor = max(self._ledger.epoch_floor, gone.epoch)
            used = {p.content_hash for turns in self._ledger.turns.values() for t in turns for p in t.pictures}
            self._ledger.pixels = {name: png for name, png in self._ledger.pixels.items() if name in used}

    async def session_tokens(self, session_id: str) -> TokenArray:
        self._check_open()
        self._session(session_id)
        return tokens_of(self._kept(session_id))

    async def list_turns(self, session_id: str) -> list[TurnRecord]:
        self._check_open()
        self._session(session_id)
        return list(self._ledger.turns[session_id])

    async def session_and_turns(self, session_id: str) -> tuple[SessionRecord, list[TurnRecord]]:
        return await self.get_session(session_id), await self.list_turns(session_id)

    async def get_turn(self, session_id: str, turn_id: str) -> TurnRecord:
        self._check_open()
        self._session(session_id)
        turns = [t for t in self._ledger.turns[session_id] if turn_id in {"", t.turn_id}]
        if not turns:
            raise UnknownTurn(
                f"session {session_id} has no turn {turn_id}" if turn_id else f"session {session_id} has no turn yet"
            )
        return turns[-1]

    async def open_turns(self, known: Container[tuple[str, str]] = ()) -> list[TurnRecord]:
        self._check_open()
        found = [
            t
            for turns in self._ledger.turns.values()
            for t in turns
            if t.outcome is None and not self._is_elsewhere(t.session_id) and (t.session_id, t.turn_id) not in known
        ]
        return sorted(found, key=lambda t: (t.created_at_ms, t.session_id))

    async def begin_turn(self, turn: TurnRecord, pixels: Mapping[str, bytes] = NO_PIXELS, fingerprint: str = "") -> int:
        async with _Write(self):
            session = self._session(turn.session_id)
            turns = self._ledger.turns[turn.session_id]
            if any(t.turn_id == turn.turn_id for t in turns):
                raise TurnExists(f"session {turn.session_id} has a turn {turn.turn_id} already")
            if session.open_turn_id:
                raise SessionBusy(f"session {turn.session_id} is answering turn {session.open_turn_id}")
            if session.n_tokens != turn.n_history_tokens:
                raise SessionBusy(
                    f"session {turn.session_id} grew from {turn.n_history_tokens} to {session.n_tokens} tokens "
                    "meanwhile: ask again"
                )
            turns.append(turn)
            self._ledger.pixels |= pixels
            self._ledger.owners[turn.session_id] = self.instance_id
            self._set(session, open_turn_id=turn.turn_id, updated_at_ms=turn.created_at_ms)
            return self._place(turn.session_id, len(turns) - 1, fingerprint) if fingerprint else 0

    async def pixels(self, content_hashes: Iterable[str]) -> dict[str, bytes]:
        self._check_open()
        return {name: self._ledger.pixels[name] for name in content_hashes if name in self._ledger.pixels}

    async def place_turn(self, session_id: str, turn_id: str, fingerprint: str) -> int:
        async with _Write(self):
            return self._place(session_id, self._claim(session_id, turn_id), fingerprint)

    def _place(self, session_id: str, number: int, fingerprint: str) -> int:
        epoch = self._session(session_id).epoch + 1
        self._set(self._session(session_id), epoch=epoch)
        turns = self._ledger.turns[session_id]
        turns[number] = dataclasses.replace(turns[number], epoch=epoch, fingerprint=fingerprint)
        return epoch

    async def finish_turn(
        self, session_id: str, turn_id: str, epoch: int, outcome: TurnOutcome, placements: Sequence[bytes], now_ms: int
    ) -> None:
        async with _Write(self):
            number = self._claim(session_id, turn_id)
            turns = self._ledger.turns[session_id]
            turn = turns[number]
            if turn.epoch != epoch:
                raise StaleEpoch(f"turn {turn_id} of session {session_id} is at epoch {turn.epoch}, not {epoch}")
            turns[number] = dataclasses.replace(turn, outcome=outcome)
            self._ledger.placements[session_id, turn_id] = list(placements)
            session = self._session(session_id)
            n_new_tokens = len(turn.prompt_ids) + len(outcome.answer_ids) if outcome.kept else 0
            self._set(
                session, open_turn_id="", updated_at_ms=now_ms, n_tokens=session.n_tokens + n_new_tokens,
                n_turns=session.n_turns + outcome.kept,
            )  # fmt: skip

    async def list_placements(self, session_id: str) -> dict[str, list[bytes]]:
        self._check_open()
        self._session(session_id)
        return {
            turn.turn_id: list(found)
            for turn in self._ledger.turns[session_id]
            if (found := self._ledger.placements.get((session_id, turn.turn_id)))
        }

    async def counts(self) -> RegistryCounts:
        n_open = sum(bool(session.open_turn_id) for session in self._ledger.sessions.values())
        return RegistryCounts(n_sessions=len(self._ledger.sessions), n_open_turns=n_open)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RegistryUnavailable("the registry is closed")

    def _session(self, session_id: str) -> SessionRecord:
        try:
            return self._ledger.sessions[session_id]
        except KeyError:
            raise UnknownSession(f"there is no session {session_id}") from None

    def _create(self, session: SessionRecord) -> SessionRecord:
        if session.session_id in self._ledger.sessions:
            raise SessionExists(f"there is a session {session.session_id} already")
        begun = dataclasses.replace(session, epoch=max(session.epoch, self._ledger.epoch_floor))
        self._ledger.sessions[session.session_id] = begun
        self._ledger.turns[session.session_id] = []
        return begun

    def _set(self, session: SessionRecord, **changes: object) -> None:
        self._ledger.sessions[session.session_id] = dataclasses.replace(session, **changes)  # type: ignore[arg-type]

    def _kept(self, session_id: str) -> list[TurnRecord]:
        return [t for t in self._ledger.turns[session_id] if t.outcome is not None and t.outcome.kept]

    def _is_elsewhere(self, session_id: str) -> bool:
        owner = self._ledger.owners.get(session_id)
        return owner != self.instance_id and owner in self._ledger.living

    def _claim(self, session_id: str, turn_id: str) -> int:
        """The open turn's number among the session's, once it is ours."""
        number = self._open_turn(session_id, turn_id)
        if self._is_elsewhere(session_id):
            address = self._ledger.living[self._ledger.owners[session_id]]
            raise TurnElsewhere(session_id, turn_id, address)
        self._ledger.owners[session_id] = self.instance_id
        return number

    def _open_turn(self, session_id: str, turn_id: str) -> int:
        for number, turn in enumerate(self._ledger.turns.get(session_id, [])):
            if turn.turn_id == turn_id and turn.outcome is None:
                return number
        raise UnknownTurn(f"session {session_id} has no open turn {turn_id}")


class _Write:
    """The disk's time around an effect: before it, and after it before anybody is told."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry

    async def __aenter__(self) -> None:
        self._registry._check_open()  # noqa: SLF001 - one object in two classes
        await self._registry._disk()  # noqa: SLF001

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            await self._registry._disk()  # noqa: SLF001
