"""Where everything lies in etcd. Names of sessions and turns hold no ``/`` (``requests.name``).

    meta                              MetaRecord
    coordinators/INSTANCE    leased   CoordinatorRecord: it lives, and is reached at this address
    epoch_floor                       the highest epoch of the sessions that were deleted
    duty                     leased   the instance that does the housekeeping
    sessions/SESSION                  StoredSession; every write of a session compares this key first
    by_use/MILLISECONDS/SESSION       empty; the order of last use
    by_expiry/MILLISECONDS/SESSION    empty; of sessions that expire by themselves, when they do if nobody uses them
    open/SESSION                      OpenTurn: the turn that is being answered, its epoch and who answers it
    turns/PLACE/POSITION/request      TurnRecord as it began
    turns/PLACE/POSITION/answer       StoredAnswer
    turn_ids/PLACE/TURN               its position
    blobs/PLACE/BLOB/NUMBER           pieces of values that are too long for one key
    pixels/HASH                       PixelsRecord
    pixel_uses/HASH/PLACE/WRITER      empty; what shows the picture: one turn, or all that a session began with

PLACE is made anew with each session: what a crash left of one that was never finished belongs to nobody, not to the
next session of that name. Pixels have a place of their own. WRITER is made anew with each use.
"""

from __future__ import annotations

import dataclasses

POSITION_DIGITS = 8
MILLISECONDS_DIGITS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """All below one prefix, so that several fleets can share an etcd."""

    prefix: str

    def _key(self, *parts: str) -> bytes:
        return "/".join((self.prefix, *parts)).encode()

    @property
    def meta(self) -> bytes:
        return self._key("meta")

    @property
    def epoch_floor(self) -> bytes:
        return self._key("epoch_floor")

    @property
    def duty(self) -> bytes:
        return self._key("duty")

    @property
    def coordinators(self) -> bytes:
        return self._key("coordinators", "")

    def coordinator(self, instance_id: str) -> bytes:
        return self._key("coordinators", instance_id)

    @property
    def sessions(self) -> bytes:
        return self._key("sessions", "")

    def session(self, session_id: str) -> bytes:
        return self._key("sessions", session_id)

    @property
    def uses(self) -> bytes:
        return self._key("by_use", "")

    def use(self, updated_at_ms: int, session_id: str) -> bytes:
        return self._key("by_use", f"{updated_at_ms:0{MILLISECONDS_DIGITS}d}", session_id)

    @property
    def expiries(self) -> bytes:
        return self._key("by_expiry", "")

    def expiry(self, expires_at_ms: int, session_id: str) -> bytes:
        return self._key("by_expiry", f"{expires_at_ms:0{MILLISECONDS_DIGITS}d}", session_id)

    @property
    def open_turns(self) -> bytes:
        return self._key("open", "")

    def open_turn(self, session_id: str) -> bytes:
        return self._key("open", session_id)

    def turns(self, place: str) -> bytes:
        return self._key("turns", place, "")

    def request(self, place: str, position: int) -> bytes:
        return self._key("turns", place, f"{position:0{POSITION_DIGITS}d}", "request")

    def answer(self, place: str, position: int) -> bytes:
        return self._key("turns", place, f"{position:0{POSITION_DIGITS}d}", "answer")

    def turn_ids(self, place: str) -> bytes:
        return self._key("turn_ids", place, "")

    def turn_id(self, place: str, turn_id: str) -> bytes:
        return self._key("turn_ids", place, turn_id)

    def blobs(self, place: str) -> bytes:
        return self._key("blobs", place, "")

    def blob(self, place: str, blob_id: str) -> bytes:
        return self._key("blobs", place, blob_id, "")

    def pixels(self, content_hash: str) -> bytes:
        return self._key("pixels", content_hash)

    def pixel_uses(self, content_hash: str) -> bytes:
        return self._key("pixel_uses", content_hash, "")

    def pixel_uses_in(self, content_hash: str, place: str) -> bytes:
        return self._key("pixel_uses", content_hash, place, "")

    def pixel_use(self, content_hash: str, place: str, writer: str) -> bytes:
        return self._key("pixel_uses", content_hash, place, writer)


def last_part(key: bytes) -> str:
    return key.rpartition(b"/")[2].decode()
