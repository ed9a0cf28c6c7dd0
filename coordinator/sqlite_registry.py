"""The embedded registry: one SQLite file on a local disk, and one thread that has it open (``sqlite_thread.py``).

The loop never touches SQLite; each method hands a function to that thread and waits for it without blocking.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from kvferry.coordinator.errors import (
    IndexOutOfRange,
    SessionBusy,
    SessionExists,
    StaleEpoch,
    StatePathInvalid,
    TurnExists,
    UnknownSession,
    UnknownTurn,
)
from kvferry.coordinator.registry import (
    NO_PIXELS,
    FinishReason,
    PageKey,
    RegistryCounts,
    SessionRecord,
    TokenArray,
    TurnOutcome,
    TurnRecord,
)
from kvferry.coordinator.registry_trouble import DAMAGED, what_to_do
from kvferry.coordinator.sqlite_pixels import (
    drop_unused_pixels,
    keep_pixels,
    select_pixels,
    use_pixels,
    used_pixels,
)
from kvferry.coordinator.sqlite_schema import (
    epoch_floor,
    insert,
    insert_placements,
    open_turn_values,
    outcome_values,
    prepare,
    raise_epoch_floor,
    session_of,
    turn_of,
    unpack_tokens,
    update_turn,
)
from kvferry.coordinator.sqlite_thread import SqliteThread


class SqliteRegistry:
    """A ``Registry``. Methods may be called from any task of one event loop; they run one after the other, in order."""

    is_shared = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = SqliteThread(path)
        self.coordinator_id = ""
        self.generation = 0
        self.is_new = False

    @property
    def instance_id(self) -> str:
        return self.coordinator_id

    async def open(self, new_coordinator_id: str, *, first_generation: int = 1, generation_at_least: int = 0) -> Self:
        """Open or make the file and raise the generation. Raises StatePathInvalid, StateIncompatible.

        ``first_generation``: of a file that is made now. ``generation_at_least``: the operator's word.
        """
        try:
            opening = await self._thread.open(
                lambda db: prepare(db, new_coordinator_id, first_generation, generation_at_least)
            )
        except sqlite3.Error as e:
            await self.close()
            raise StatePathInvalid(
                f"the registry {self._path} cannot be opened: {e}; {what_to_do(e, self._path)}"
            ) from e
        except (KeyError, ValueError) as e:  # tables as ours, with something else in them
            await self.close()
            raise StatePathInvalid(f"the registry {self._path} cannot be opened: {DAMAGED}") from e
        except BaseException:
            await self.close()
            raise
        self.coordinator_id, self.generation = opening.coordinator_id, opening.generation
        self.is_new = opening.is_new
        return self

    async def close(self) -> None:
        await self._thread.close()

    async def announce(self, address: str) -> None:
        """There is nobody to be told."""

    async def keeps_house(self) -> bool:
        return True

    async def claim_turn(self, session_id: str, turn_id: str) -> None:
        await self._thread.read(lambda db: select_open_turn(db, session_id, turn_id))

    async def create_session(self, session: SessionRecord) -> SessionRecord:
        return await self._thread.write(lambda db: insert_session(db, session))

    async def get_session(self, session_id: str) -> SessionRecord:
        return await self._thread.read(lambda db: select_session(db, session_id))

    async def list_sessions(self, limit: int, after: PageKey | None) -> list[SessionRecord]:
        def select(db: sqlite3.Connection) -> list[SessionRecord]:
            start = (after.updated_at_ms, after.session_id) if after else (2**63 - 1, "\U0010ffff")
            query = (
                "SELECT * FROM sessions WHERE (updated_at_ms, session_id) < (?, ?) "
                "ORDER BY updated_at_ms DESC, session_id DESC LIMIT ?"
            )
            return [session_of(row) for row in db.execute(query, (*start, limit))]

        return await self._thread.read(select)

    async def fork_session(
        self, session_id: str, fork: SessionRecord, n_turns: int | None, last_outcome: TurnOutcome | None = None
    ) -> SessionRecord:
        return await self._thread.write(lambda db: fork_session(db, session_id, fork, n_turns, last_outcome))

    async def import_session(
        self, session: SessionRecord, turns: Sequence[TurnRecord], pixels: Mapping[str, bytes] = NO_PIXELS
    ) -> SessionRecord:
        def import_all(db: sqlite3.Connection) -> SessionRecord:
            begun = insert_session(db, session)
            for position, turn in enumerate(turns):
                insert(db, "turns", open_turn_values(turn, position) | outcome_values(kept_outcome(turn)))
            keep_pixels(db, session.session_id, pixels)
            return begun

        return await self._thread.write(import_all)

    async def expired_sessions(self, now_ms: int, before_ms: int, limit: int) -> list[str]:
        query = (
            "SELECT session_id FROM sessions WHERE open_turn_id = '' AND (updated_at_ms < :before_ms "
            "OR (expires_after_s > 0 AND updated_at_ms + 1000 * expires_after_s < :now_ms)) "
            "ORDER BY updated_at_ms, session_id LIMIT :limit"
        )
        bounds = {"now_ms": now_ms, "before_ms": before_ms, "limit": limit}
        return await self._thread.read(lambda db: [row["session_id"] for row in db.execute(query, bounds)])

    async def delete_session(self, session_id: str) -> None:
        def delete(db: sqlite3.Connection) -> None:
            session = select_session(db, session_id)
            if session.open_turn_id:
                raise SessionBusy(f"session {session_id} has an open turn, {session.open_turn_id}: cancel it first")
            raise_epoch_floor(db, session.epoch)
            used = used_pixels(db, session_id)
            db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
            drop_unused_pixels(db, used)

        await self._thread.write(delete)

    async def session_tokens(self, session_id: str) -> TokenArray:
        def select(db: sqlite3.Connection) -> TokenArray:
            select_session(db, session_id)
            return unpack_tokens(
                blob for row in select_kept_turns(db, session_id) for blob in (row["prompt_ids"], row["answer_ids"])
            )

        return await self._thread.read(select)

    async def list_turns(self, session_id: str) -> list[TurnRecord]:
        def select(db: sqlite3.Connection) -> list[TurnRecord]:
            select_session(db, session_id)
            return select_turns(db, session_id)

        return await self._thread.read(select)

    async def session_and_turns(self, session_id: str) -> tuple[SessionRecord, list[TurnRecord]]:
        return await self._thread.read(lambda db: (select_session(db, session_id), select_turns(db, session_id)))

    async def get_turn(self, session_id: str, turn_id: str) -> TurnRecord:
        return await self._thread.read(lambda db: select_turn(db, session_id, turn_id))

    async def open_turns(self, known: Container[tuple[str, str]] = ()) -> list[TurnRecord]:
        query = "SELECT * FROM turns WHERE reason IS NULL ORDER BY created_at_ms, session_id"

        def select(db: sqlite3.Connection) -> list[TurnRecord]:
            return [turn_of(row) for row in db.execute(query) if (row["session_id"], row["turn_id"]) not in known]

        return await self._thread.read(select)

    async def begin_turn(self, turn: TurnRecord, pixels: Mapping[str, bytes] = NO_PIXELS, fingerprint: str = "") -> int:
        def begin(db: sqlite3.Connection) -> int:
            epoch = begin_turn(db, turn, fingerprint)
            if pixels:
                keep_pixels(db, turn.session_id, pixels)
            return epoch

        return await self._thread.write(begin)

    async def pixels(self, content_hashes: Iterable[str]) -> dict[str, bytes]:
        names = list(content_hashes)  # the thread may run a call twice, and an iterator gives its items once
        return await self._thread.read(lambda db: select_pixels(db, names))

    async def place_turn(self, session_id: str, turn_id: str, fingerprint: str) -> int:
        def place(db: sqlite3.Connection) -> int:
            select_open_turn(db, session_id, turn_id)
            epoch = select_session(db, session_id).epoch + 1
            db.execute("UPDATE sessions SET epoch = ? WHERE session_id = ?", (epoch, session_id))
            update_turn(db, session_id, turn_id, {"epoch": epoch, "fingerprint": fingerprint})
            return epoch

        return await self._thread.write(place)

    async def finish_turn(
        self, session_id: str, turn_id: str, epoch: int, outcome: TurnOutcome, placements: Sequence[bytes], now_ms: int
    ) -> None:
        def finish(db: sqlite3.Connection) -> None:
            turn = select_open_turn(db, session_id, turn_id)
            if turn.epoch != epoch:
                raise StaleEpoch(f"turn {turn_id} of session {session_id} is at epoch {turn.epoch}, not {epoch}")
            update_turn(db, session_id, turn_id, outcome_values(outcome))
            insert_placements(db, session_id, turn_id, placements)
            n_new_tokens = len(turn.prompt_ids) + len(outcome.answer_ids) if outcome.kept else 0
            db.execute(
                "UPDATE sessions SET open_turn_id = '', updated_at_ms = ?, n_tokens = n_tokens + ?, "
                "n_turns = n_turns + ? WHERE session_id = ?",
                (now_ms, n_new_tokens, int(outcome.kept), session_id),
            )

        await self._thread.write(finish)

    async def list_placements(self, session_id: str) -> dict[str, list[bytes]]:
        def select(db: sqlite3.Connection) -> dict[str, list[bytes]]:
            select_session(db, session_id)
            found: dict[str, list[bytes]] = {}
            query = "SELECT turn_id, placement FROM placements WHERE session_id = ? ORDER BY turn_id, number"
            for turn_id, blob in db.execute(query, (session_id,)):
                found.setdefault(turn_id, []).append(blob)
            return found

        return await self._thread.read(select)

    async def counts(self) -> RegistryCounts:
        def count(db: sqlite3.Connection) -> RegistryCounts:
            (n_sessions,) = db.execute("SELECT count(*) FROM sessions").fetchone()
            (n_open,) = db.execute("SELECT count(*) FROM turns WHERE reason IS NULL").fetchone()
            return RegistryCounts(n_sessions=n_sessions, n_open_turns=n_open)

        return await self._thread.read(count)


def insert_session(db: sqlite3.Connection, session: SessionRecord) -> SessionRecord:
    begun = dataclasses.replace(session, epoch=max(session.epoch, epoch_floor(db)))
    try:
        insert(db, "sessions", dataclasses.asdict(begun))
    except sqlite3.IntegrityError as e:
        raise SessionExists(f"there is a session {session.session_id} already") from e
    return begun


def select_session(db: sqlite3.Connection, session_id: str) -> SessionRecord:
    row = db.execute("SELECT * FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    if row is None:
        raise UnknownSession(f"there is no session {session_id}")
    return session_of(row)


def select_turn(db: sqlite3.Connection, session_id: str, turn_id: str) -> TurnRecord:
    select_session(db, session_id)
    wanted, value = ("turn_id = ?", (session_id, turn_id)) if turn_id else ("TRUE", (session_id,))
    query = f"SELECT * FROM turns WHERE session_id = ? AND {wanted} ORDER BY position DESC LIMIT 1"  # noqa: S608 - two literals
    row = db.execute(query, value).fetchone()
    if row is None:
        raise UnknownTurn(
            f"session {session_id} has no turn {turn_id}" if turn_id else f"session {session_id} has no turn yet"
        )
    return turn_of(row)


def select_open_turn(db: sqlite3.Connection, session_id: str, turn_id: str) -> TurnRecord:
    query = "SELECT * FROM turns WHERE session_id = ? AND turn_id = ? AND reason IS NULL"
    row = db.execute(query, (session_id, turn_id)).fetchone()
    if row is None:
        raise UnknownTurn(f"session {session_id} has no open turn {turn_id}")
    return turn_of(row)


def select_turns(db: sqlite3.Connection, session_id: str) -> list[TurnRecord]:
    rows = db.execute("SELECT * FROM turns WHERE session_id = ? ORDER BY position", (session_id,))
    return [turn_of(row) for row in rows]


def select_kept_turns(db: sqlite3.Connection, session_id: str) -> list[sqlite3.Row]:
    query = "SELECT * FROM turns WHERE session_id = ? AND reason IS NOT NULL AND reason <> ? ORDER BY position"
    return db.execute(query, (session_id, int(FinishReason.ERROR))).fetchall()


def begin_turn(db: sqlite3.Connection, turn: TurnRecord, fingerprint: str) -> int:
    """In as few statements as there can be: a first token waits for them."""
    session = select_session(db, turn.session_id)
    counting = "SELECT count(*), coalesce(max(turn_id = ?), 0) FROM turns WHERE session_id = ?"
    n_before, is_taken = db.execute(counting, (turn.turn_id, turn.session_id)).fetchone()
    if is_taken:
        raise TurnExists(f"session {turn.session_id} has a turn {turn.turn_id} already")
    if session.open_turn_id:
        raise SessionBusy(
            f"session {turn.session_id} is answering turn {session.open_turn_id}: wait for it or cancel it"
        )
    if session.n_tokens != turn.n_history_tokens:
        raise SessionBusy(
            f"session {turn.session_id} grew from {turn.n_history_tokens} to {session.n_tokens} tokens meanwhile: "
            "ask again"
        )
    epoch = session.epoch + 1 if fingerprint else 0
    insert(db, "turns", open_turn_values(turn, n_before) | {"epoch": epoch, "fingerprint": fingerprint})
    db.execute(
        "UPDATE sessions SET open_turn_id = ?, updated_at_ms = ?, epoch = max(epoch, ?) WHERE session_id = ?",
        (turn.turn_id, turn.created_at_ms, epoch, turn.session_id),
    )
    return epoch


def kept_outcome(turn: TurnRecord) -> TurnOutcome:
    if turn.outcome is None or not turn.outcome.kept:
        raise AssertionError(f"turn {turn.turn_id} is no part of a conversation")
    return turn.outcome


def fork_session(
    db: sqlite3.Connection, session_id: str, fork: SessionRecord, n_turns: int | None, last_outcome: TurnOutcome | None
) -> SessionRecord:
    parent = select_session(db, session_id)
    kept = select_kept_turns(db, session_id)
    if n_turns is not None and n_turns > len(kept):
        raise IndexOutOfRange(f"session {session_id} has {len(kept)} finished turns, not {n_turns}")
    copied = [dict(row) for row in kept[:n_turns]]
    if copied and last_outcome is not None:
        copied[-1] |= outcome_values(last_outcome)
    n_tokens = sum(len(row["prompt_ids"]) + len(row["answer_ids"]) for row in copied) // 4
    made = insert_session(db, dataclasses.replace(
        fork, model=parent.model, tokenizer_digest=parent.tokenizer_digest, tenant=parent.tenant,
        n_tokens=n_tokens, n_turns=len(copied), forked_from=session_id, expires_after_s=parent.expires_after_s,
    ))  # fmt: skip
    for position, row in enumerate(copied):
        insert(db, "turns", {**row, "session_id": made.session_id, "position": position})
        use_pixels(db, made.session_id, [picture["content_hash"] for picture in json.loads(row["pictures"])])
    return made
