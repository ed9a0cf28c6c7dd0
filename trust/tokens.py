"""API tokens of clients: a file of hashes, which tenant each is for, and how much it may ask.

A token is ``kvf_ID_SECRET``. The file keeps its id and the SHA-256 of the whole, never the token: whoever reads the
file cannot use what is in it, and 256 random bits need no slow hash.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import pydantic
from pydantic import Field

from kvferry.trust.clock import now_utc, usable
from kvferry.trust.errors import TokensInvalid, Unauthenticated
from kvferry.trust.files import SECRET_MODE, reason_of, write_atomically
from kvferry.trust.rereading import Reread

PREFIX: Final = "kvf_"

MAX_DAYS: Final = 36_500
"""Longer than anybody means; whoever wants no end leaves it out."""

TOKEN: Final = re.compile(r"kvf_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class Token(pydantic.BaseModel):
    """One line of the file. ``tenant``: whose sessions it makes and sees. Limits that are None do not limit."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern="^[0-9a-f]{12}$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", repr=False)
    tenant: str = Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")
    requests_per_minute: int | None = Field(default=None, ge=1, le=1_000_000)
    concurrent_turns: int | None = Field(default=None, ge=1, le=1_000_000)
    created_at: pydantic.AwareDatetime
    expires_at: pydantic.AwareDatetime | None = None
    revoked_at: pydantic.AwareDatetime | None = None

    def state(self, now: dt.datetime) -> Literal["valid", "revoked", "expired"]:
        """Revoked rather than expired, if both."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "valid"


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    version: Literal[1] = 1
    tokens: list[Token] = []


def read_tokens(path: Path) -> list[Token]:
    """Raises TokensInvalid."""
    try:
        return _File.model_validate_json(path.read_bytes()).tokens
    except OSError as error:
        raise TokensInvalid(f"the tokens file {path} cannot be read: {reason_of(error)}") from error
    except pydantic.ValidationError as error:
        where = error.errors()[0]
        what = f"{'.'.join(map(str, where['loc']))}: {where['msg']}".removeprefix(": ")
        raise TokensInvalid(f"{path} is no tokens file of kvferry tokens: {what}") from error


def write_tokens(path: Path, tokens: list[Token]) -> None:
    """Raises TokensInvalid."""
    text = json.dumps(_File(tokens=tokens).model_dump(mode="json", exclude_none=True), indent=1)
    try:
        write_atomically(path, text.encode() + b"\n", SECRET_MODE)
    except OSError as error:
        raise TokensInvalid(f"the tokens file {path} cannot be written: {reason_of(error)}") from error


def change_tokens(path: Path, change: Callable[[list[Token]], list[Token]], *, may_be_new: bool = False) -> None:
    """Read, change and write in one go: two commands at once lose nothing. Raises TokensInvalid."""
    try:
        fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET_MODE)
    except OSError as error:
        raise TokensInvalid(f"the tokens file {path} cannot be changed: {reason_of(error)}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        present = [] if may_be_new and not path.exists() else read_tokens(path)
        write_tokens(path, change(present))
    finally:
        os.close(fd)


def revoked(tokens: list[Token], token_id: str) -> list[Token]:
    """The same, of which one is revoked. Raises TokensInvalid when it is not there."""
    if all(token.id != token_id for token in tokens):
        raise TokensInvalid(f"there is no token {token_id[:40]}: see kvferry tokens list")
    now = now_utc()
    return [t.model_copy(update={"revoked_at": t.revoked_at or now}) if t.id == token_id else t for t in tokens]


def new_token(
    tenant: str,
    *,
    requests_per_minute: int | None = None,
    concurrent_turns: int | None = None,
    days: float | None = None,
    now: dt.datetime | None = None,
) -> tuple[str, Token]:
    """The token, which nobody can find out later, and what is kept of it. Raises TokensInvalid, ClockWrong."""
    if days is not None and not 0 < days <= MAX_DAYS:
        raise TokensInvalid(f"such a token cannot be made: it is valid for more than 0 and at most {MAX_DAYS} days")
    now = usable(now or now_utc())
    token_id = secrets.token_hex(6)
    text = f"{PREFIX}{token_id}_{secrets.token_urlsafe(32)}"
    try:
        kept = Token(
            id=token_id, sha256=_hash(text), tenant=tenant, requests_per_minute=requests_per_minute,
            concurrent_turns=concurrent_turns, created_at=now,
            expires_at=None if days is None else now + dt.timedelta(days=days),
        )  # fmt: skip
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{p['loc'][0]} {p['input']!r}: {p['msg']}" for p in error.errors())
        raise TokensInvalid(f"such a token cannot be made: {problems}") from error
    return text, kept


class TokenBook:
    """The file, read again when it changes. Any thread may call."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], dt.datetime] = now_utc,
    ) -> None:
        """Raises TokensInvalid."""
        self._wall = wall
        self._reread = Reread([path], lambda: {t.id: t for t in read_tokens(path)}, "the API tokens", clock)

    def find(self, text: str) -> Token:
        """The line of a token that is valid now. Raises Unauthenticated, whose sentence does not hold the token."""
        match = TOKEN.fullmatch(text)
        known = self._current().get(match[1]) if match else None
        # compared even when it is unknown: how long the answer takes tells nothing
        is_right = hmac.compare_digest(_hash(text), known.sha256 if known else "0" * 64)
        if known is None or not is_right:
            raise Unauthenticated("this API token is not known here: see whether it was copied whole")
        self._check_state(known)
        return known

    def check(self, token: Token) -> None:
        """That one found before is still valid. Raises Unauthenticated."""
        known = self._current().get(token.id)
        if known is None or known.sha256 != token.sha256:
            raise Unauthenticated(f"the API token {token.id} is gone: ask the operator for a new one")
        self._check_state(known)

    def _check_state(self, token: Token) -> None:
        if (state := token.state(self._wall())) != "valid":
            raise Unauthenticated(f"the API token {token.id} is {state}: ask the operator for a new one")

    def _current(self) -> dict[str, Token]:
        return self._reread.current()[0]


def open_book(path: Path | None) -> TokenBook | None:
    """None for None: nobody needs a token. Raises TokensInvalid."""
    return None if path is None else TokenBook(path)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
