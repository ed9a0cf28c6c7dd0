"""The sessions whose rows lie in memory: which one helps a request most, and which one goes when memory is short.

Used by the engine thread only; no clock, no I/O. A resident session is idle: while a turn runs, the turn has the
sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.vision.placed import Images, common_prefix

__all__ = ["Resident", "ResidentSessions", "RowOwner", "n_shared"]


class RowOwner(Protocol):
    """Whoever has a session's rows: an idle session, or a run."""

    n_published: int
    sequence: KvSequence

    @property
    def session_id(self) -> str:
        """The session."""

    @property
    def images(self) -> Images:
        """Among its tokens."""

    @property
    def namespace(self) -> str:
        """Whose rows they are: only turns of the same one reuse them."""

    def tokens_with_rows(self) -> NDArray[np.int32]:
        """The tokens whose rows exist, int32 [sequence.n_rows]."""


def n_shared(owner: RowOwner, token_ids: NDArray[np.int32], namespace: str, images: Images = ()) -> int:
    """How many leading rows of an owner a request of these tokens may reuse."""
    if owner.namespace != namespace:
        return 0
    return common_prefix(owner.tokens_with_rows(), token_ids, owner.images, images)


@dataclass(slots=True)
class Resident:
    """The rows of one idle session; token_ids are those that have rows."""

    session_id: str
    token_ids: NDArray[np.int32]  # [n_rows]
    sequence: KvSequence
    n_published: int  # how many of the rows are in the store, as far as we know
    publish_failed: bool = False  # do not hold memory for a store that does not take it
    images: Images = ()
    namespace: str = ""

    @property
    def n_unpublished(self) -> int:
        """Rows that would be lost with this process."""
        return len(self.token_ids) - self.n_published

    def tokens_with_rows(self) -> NDArray[np.int32]:
        """All its tokens, int32 [sequence.n_rows]."""
        return self.token_ids


@dataclass(slots=True)
class ResidentSessions:
    """Idle sessions, the least recently used first."""

    _by_id: OrderedDict[str, Resident] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._by_id.values())

    def __repr__(self) -> str:
        """One line that a test can compare with."""
        return "<Resident " + ", ".join(f"{r.session_id}:{len(r.token_ids)}" for r in self) + ">"

    def get(self, session_id: str) -> Resident | None:
        """The session, without marking it as used."""
        return self._by_id.get(session_id)

    def keep(self, resident: Resident) -> None:
        """Add or replace a session as the most recently used one; releases the rows of the one it replaces."""
        old = self._by_id.pop(resident.session_id, None)
        if old is not None:
            old.sequence.release()
        self._by_id[resident.session_id] = resident

    def take(self, session_id: str) -> Resident | None:
        """Remove a session and give its rows to the caller."""
        return self._by_id.pop(session_id, None)

    def touch(self, session_id: str) -> None:
        """Mark as used."""
        if session_id in self._by_id:
            self._by_id.move_to_end(session_id)

    def oldest(self) -> Resident | None:
        """The least recently used one."""
        return next(iter(self._by_id.values()), None)

    def best_match(
        self, token_ids: NDArray[np.int32], preferred: str, namespace: str = "", images: Images = ()
    ) -> tuple[Resident, int] | None:
        """The session that shares most leading tokens with a request of its namespace, and how many; `preferred` wins
        ties."""
        best: tuple[Resident, int] | None = None
        for resident in self:
            n_common = n_shared(resident, token_ids, namespace, images)
            if n_common == 0 or (best and n_common < best[1]):
                continue
            if best is None or n_common > best[1] or resident.session_id == preferred:
                best = (resident, n_common)
        return best
