"""The registry's tables, and how a row becomes a record. Token ids are little-endian int32 blobs."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from kvferry.coordinator import sqlite_pixels
from kvferry.coordinator.errors import StateIncompatible
from kvferry.coordinator.registry import (
    AnswerForm,
    FinishReason,
    Message,
    Picture,
    SessionRecord,
    TokenArray,
    TurnOutcome,
    TurnRecord,
)
from kvferry.engine.text.messages import Tool, ToolCall

SCHEMA_VERSION: Final = 6

READABLE_SINCE: Final = 6
"""The oldest version whose program may use these tables as they are, so that one release can be gone back: it finds all
it knows, does not mind columns that it does not, and those have defaults. Written into the file."""

EXPIRY: Final = """
CREATE INDEX sessions_by_expiry ON sessions (updated_at_ms + 1000 * expires_after_s) WHERE expires_after_s > 0;
"""

CONVERSATIONS: Final = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    tokenizer_digest TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    updated_at_ms INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL,
    n_turns INTEGER NOT NULL,
    open_turn_id TEXT NOT NULL,
    forked_from TEXT NOT NULL,
    tenant TEXT NOT NULL DEFAULT '',
    expires_after_s INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX sessions_by_use ON sessions (updated_at_ms DESC, session_id DESC);

CREATE TABLE turns (
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
    position INTEGER NOT NULL,
    turn_id TEXT NOT NULL,
    messages TEXT NOT NULL,
    n_history_tokens INTEGER NOT NULL,
    prompt_ids BLOB NOT NULL,
    sampling BLOB NOT NULL,
    max_tokens INTEGER NOT NULL,
    stop TEXT NOT NULL,
    digest TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    -- NULL while the turn is open
    reason INTEGER,
    answer_ids BLOB,
    answer_text TEXT,
    logprobs BLOB,
    error_code TEXT,
    error TEXT,
    first_token_seconds REAL,
    total_seconds REAL,
    longest_pause_seconds REAL,
    n_placements INTEGER,
    -- what differs from the plain AnswerForm, as JSON
    form TEXT NOT NULL DEFAULT '{}',
    pictures TEXT NOT NULL DEFAULT '[]',
    priority INTEGER NOT NULL DEFAULT 0,
    deadline_ms INTEGER NOT NULL DEFAULT 0,
    n_samples INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (session_id, position),
    UNIQUE (session_id, turn_id)
) STRICT;
CREATE INDEX open_turns ON turns (session_id) WHERE reason IS NULL;

CREATE TABLE placements (
    session_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    placement BLOB NOT NULL,
    PRIMARY KEY (session_id, turn_id, number),
    FOREIGN KEY (session_id, turn_id) REFERENCES turns (session_id, turn_id) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
"""

TABLES: Final = f"{CONVERSATIONS} {EXPIRY} {sqlite_pixels.TABLES}"

UPGRADES: Final = {
    1: "ALTER TABLE turns ADD COLUMN form TEXT NOT NULL DEFAULT '{}'",
    2: f"ALTER TABLE turns ADD COLUMN pictures TEXT NOT NULL DEFAULT '[]'; {sqlite_pixels.TABLES}",
    3: "; ".join(
        f"ALTER TABLE turns ADD COLUMN {column} INTEGER NOT NULL DEFAULT {default}"
        for column, default in (("priority", 0), ("deadline_ms", 0), ("n_samples", 1))
    ),
    4: "ALTER TABLE sessions ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
    5: f"ALTER TABLE sessions ADD COLUMN expires_after_s INTEGER NOT NULL DEFAULT 0; {EXPIRY}",
}
"""What makes the tables of a version those of the next."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What an opened registry is from now on."""

    coordinator_id: str
    generation: int
    # Made by this opening.
    is_new: bool


def prepare(
    connection: sqlite3.Connection, new_coordinator_id: str, first_generation: int, generation_at_least: int
) -> Opening:
    """Make the tables, or bring them up to date, and raise the generation durably.

    Raises StateIncompatible when a newer version of the program made them, and does not say that this one may use them.
    """
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found == 0:
        connection.executescript(
            f"BEGIN IMMEDIATE; {TABLES} "  # noqa: S608 - constants of this module, and integers
            f"INSERT INTO meta VALUES ('generation', '{first_generation - 1:d}'); "
            f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    elif not 1 <= found <= SCHEMA_VERSION and not _is_readable(connection):
        raise StateIncompatible(
            f"the state folder has version {found} of its layout and this program knows version {SCHEMA_VERSION}: "
            "start the program that wrote it, or give another folder with --state"
        )
    elif found < SCHEMA_VERSION:
        steps = "; ".join(UPGRADES[version] for version in range(found, SCHEMA_VERSION))
        connection.executescript(f"BEGIN IMMEDIATE; {steps}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    with connection:
        if found <= SCHEMA_VERSION:
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('readable_since', ?)", (str(READABLE_SINCE),))
        connection.execute("INSERT OR IGNORE INTO meta VALUES ('coordinator_id', ?)", (new_coordinator_id,))
        connection.execute(
            "UPDATE meta SET value = max(CAST(value AS INTEGER) + 1, ?) WHERE key = 'generation'",
            (generation_at_least,),
        )
        rows = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    return Opening(coordinator_id=rows["coordinator_id"], generation=int(rows["generation"]), is_new=found == 0)


def _is_readable(connection: sqlite3.Connection) -> bool:
    """Whether a newer program says that this one may use its tables."""
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'readable_since'").fetchone()
    except sqlite3.OperationalError:  # no tables of ours
        return False
    return row is not None and int(row[0]) <= SCHEMA_VERSION


def pack_tokens(token_ids: TokenArray) -> bytes:
    return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()


def unpack_tokens(blobs: Iterable[bytes]) -> TokenArray:
    return np.frombuffer(b"".join(blobs), dtype="<i4").astype(np.int32)


_SESSION_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(SessionRecord))


def session_of(row: sqlite3.Row) -> SessionRecord:
    return SessionRecord(**{key: row[key] for key in row.keys() if key in _SESSION_FIELDS})  # noqa: SIM118 - a Row iterates over its values


def turn_of(row: sqlite3.Row) -> TurnRecord:
    return TurnRecord(
        session_id=row["session_id"],
        turn_id=row["turn_id"],
        messages=tuple(message_of(*fields) for fields in json.loads(row["messages"])),
        n_history_tokens=row["n_history_tokens"],
        prompt_ids=unpack_tokens([row["prompt_ids"]]),
        sampling=row["sampling"],
        max_tokens=row["max_tokens"],
        stop=tuple(json.loads(row["stop"])),
        digest=row["digest"],
        created_at_ms=row["created_at_ms"],
        fingerprint=row["fingerprint"],
        epoch=row["epoch"],
        outcome=None if row["reason"] is None else outcome_of(row),
        form=form_of(json.loads(row["form"])),
        pictures=tuple(Picture(**picture) for picture in json.loads(row["pictures"])),
        priority=row["priority"],
        deadline_ms=row["deadline_ms"],
        n_samples=row["n_samples"],
    )


def message_of(role: str, content: str, more: dict[str, Any] | None = None) -> Message:
    """Of what ``message_fields`` made."""
    more = dict(more or {})
    calls = tuple(ToolCall(**call) for call in more.pop("tool_calls", ()))
    return Message(role, content, tool_calls=calls, **more)


def message_fields(message: Message) -> list[object]:
    """Role and content, and only where there is more a third part."""
    plain = dataclasses.asdict(Message(message.role, message.content))
    more = {key: value for key, value in dataclasses.asdict(message).items() if value != plain[key]}
    return [message.role, message.content, *([more] if more else [])]


def form_of(fields: dict[str, Any]) -> AnswerForm:
    tools = tuple(Tool(**tool) for tool in fields.pop("tools", ()))
    return AnswerForm(tools=tools, **fields)


def form_fields(form: AnswerForm) -> dict[str, object]:
    """Only what differs from a plain form."""
    plain = dataclasses.asdict(AnswerForm())
    return {key: value for key, value in dataclasses.asdict(form).items() if value != plain[key]}


def outcome_of(row: sqlite3.Row) -> TurnOutcome:
    return TurnOutcome(
        reason=FinishReason(row["reason"]),
        answer_ids=unpack_tokens([row["answer_ids"]]),
        answer_text=row["answer_text"],
        logprobs=row["logprobs"],
        error_code=row["error_code"],
        error=row["error"],
        first_token_seconds=row["first_token_seconds"],
        total_seconds=row["total_seconds"],
        longest_pause_seconds=row["longest_pause_seconds"],
        n_placements=row["n_placements"],
    )


def open_turn_values(turn: TurnRecord, position: int) -> dict[str, object]:
    """The columns of a turn that begins."""
    return {
        "session_id": turn.session_id,
        "position": position,
        "turn_id": turn.turn_id,
        "messages": json.dumps([message_fields(m) for m in turn.messages], ensure_ascii=False),
        "n_history_tokens": turn.n_history_tokens,
        "prompt_ids": pack_tokens(turn.prompt_ids),
        "sampling": turn.sampling,
        "max_tokens": turn.max_tokens,
        "stop": json.dumps(turn.stop, ensure_ascii=False),
        "digest": turn.digest,
        "created_at_ms": turn.created_at_ms,
        "fingerprint": turn.fingerprint,
        "epoch": turn.epoch,
        "form": json.dumps(form_fields(turn.form), ensure_ascii=False),
        "pictures": json.dumps([dataclasses.asdict(picture) for picture in turn.pictures]),
        "priority": turn.priority,
        "deadline_ms": turn.deadline_ms,
        "n_samples": turn.n_samples,
    }


def outcome_values(outcome: TurnOutcome) -> dict[str, object]:
    """The columns of a turn that ends."""
    return {
        "reason": int(outcome.reason),
        "answer_ids": pack_tokens(outcome.answer_ids),
        "answer_text": outcome.answer_text,
        "logprobs": outcome.logprobs,
        "error_code": outcome.error_code,
        "error": outcome.error,
        "first_token_seconds": outcome.first_token_seconds,
        "total_seconds": outcome.total_seconds,
        "longest_pause_seconds": outcome.longest_pause_seconds,
        "n_placements": outcome.n_placements,
    }


def epoch_floor(connection: sqlite3.Connection) -> int:
    """The highest epoch of the sessions that were deleted."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'epoch_floor'").fetchone()
    return 0 if row is None else int(row["value"])


def raise_epoch_floor(connection: sqlite3.Connection, epoch: int) -> None:
    """A session of this epoch is deleted."""
    if epoch > epoch_floor(connection):
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('epoch_floor', ?)", (str(epoch),))


def insert(connection: sqlite3.Connection, table: str, values: dict[str, object]) -> None:
    """``table`` and the keys are names of this module, never a caller's text."""
    columns = ", ".join(values)
    marks = ", ".join(f":{column}" for column in values)
    connection.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", values)  # noqa: S608 - see the docstring


def update_turn(connection: sqlite3.Connection, session_id: str, turn_id: str, values: dict[str, object]) -> None:
    """The keys of ``values`` are column names of this module, never a caller's text."""
    sets = ", ".join(f"{column} = :{column}" for column in values)
    where = {"the_session": session_id, "the_turn": turn_id}
    connection.execute(
        f"UPDATE turns SET {sets} WHERE session_id = :the_session AND turn_id = :the_turn",  # noqa: S608
        {**values, **where},
    )


def insert_placements(
    connection: sqlite3.Connection, session_id: str, turn_id: str, placements: Sequence[bytes]
) -> None:
    connection.executemany(
        "INSERT INTO placements VALUES (?, ?, ?, ?)",
        [(session_id, turn_id, number, blob) for number, blob in enumerate(placements)],
    )
