"""Pixels of pictures in the registry: once for each content, for as long as a session has use of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Final

TABLES: Final = """
CREATE TABLE pixels (
    content_hash TEXT PRIMARY KEY,
    png BLOB NOT NULL
) STRICT;

CREATE TABLE pixel_uses (
    content_hash TEXT NOT NULL REFERENCES pixels,
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
    PRIMARY KEY (content_hash, session_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX pixel_uses_by_session ON pixel_uses (session_id);
"""


def keep_pixels(db: sqlite3.Connection, session_id: str, pixels: Mapping[str, bytes]) -> None:
    """PNG files by content hash; those that are there already are only counted."""
    db.executemany("INSERT OR IGNORE INTO pixels VALUES (?, ?)", pixels.items())
    use_pixels(db, session_id, pixels)


def use_pixels(db: sqlite3.Connection, session_id: str, content_hashes: Iterable[str]) -> None:
    """The session has use of pixels that are there."""
    uses = [(content_hash, session_id) for content_hash in content_hashes]
    db.executemany("INSERT OR IGNORE INTO pixel_uses VALUES (?, ?)", uses)


def used_pixels(db: sqlite3.Connection, session_id: str) -> list[str]:
    """The content hashes that a session has use of."""
    query = "SELECT content_hash FROM pixel_uses WHERE session_id = ?"
    return [row["content_hash"] for row in db.execute(query, (session_id,))]


def drop_unused_pixels(db: sqlite3.Connection, content_hashes: Iterable[str]) -> None:
    """Of these, what no session has use of any more."""
    db.executemany(
        "DELETE FROM pixels WHERE content_hash = ?1 AND NOT EXISTS (SELECT 1 FROM pixel_uses WHERE content_hash = ?1)",
        [(content_hash,) for content_hash in content_hashes],
    )


def select_pixels(db: sqlite3.Connection, content_hashes: Iterable[str]) -> dict[str, bytes]:
    """The PNG files of those that are there."""
    query = "SELECT png FROM pixels WHERE content_hash = ?"
    found = {name: db.execute(query, (name,)).fetchone() for name in content_hashes}
    return {name: row["png"] for name, row in found.items() if row is not None}
