"""Computing restored rows again while there is nothing else to do, and comparing bits: the store and the disk behind it
are believed because this never finds anything. Used by the engine thread only.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import OutOfKvMemory
from kvferry.engine.kv_cache import KvGeometry, KvSequence
from kvferry.node.sessions import Resident, ResidentSessions

log = logging.getLogger(__name__)

EVERY_SECONDS: Final = 10.0
"""Between two blocks, each of which costs a prefill of 32 rows: well below 1 % of an idle board."""

PIECE_ROWS: Final = 4
"""Computed at a time: a turn that comes meanwhile waits for hardly more than a token of it takes."""

MAX_REMEMBERED: Final = 1024
"""Sessions of which it is known how many of their rows were read from the store."""


@dataclass(frozen=True, slots=True)
class _Look:
    """A block that is being computed again, rows start.. of a session, into ``again``."""

    resident: Resident
    snapshot: str
    start: int
    again: KvSequence


@dataclass(slots=True)
class RestoreAudit:
    """``compute`` appends the rows of tokens to a sequence, as the engine does. ``clock`` gives seconds; ``chance``
    chooses what is looked at."""

    compute: Callable[[KvSequence, NDArray[np.int32]], None]
    geometry: KvGeometry
    clock: Callable[[], float]
    chance: random.Random
    every_seconds: float = EVERY_SECONDS
    n_audited: int = 0  # blocks
    n_wrong: int = 0
    _restored: OrderedDict[str, tuple[int, str]] = field(default_factory=OrderedDict)  # session: rows, snapshot
    _next_at: float = 0.0
    _look: _Look | None = None

    def note(self, session_id: str, n_rows: int, snapshot: str) -> None:
        """A session's first n_rows were read from this snapshot."""
        self._restored.pop(session_id, None)
        self._restored[session_id] = (n_rows, snapshot)
        if len(self._restored) > MAX_REMEMBERED:
            self._restored.popitem(last=False)

    @property
    def is_looking(self) -> bool:
        """Whether a block is half computed, so that ``look`` should be called again soon."""
        return self._look is not None

    def abandon(self) -> None:
        """There is work to do: leave the block, and the memory."""
        if self._look is not None:
            self._look.again.release()
            self._look = None

    def look(self, sessions: ResidentSessions) -> str | None:
        """Computes a piece of one random restored block again, if it is time; returns the session whose rows are
        wrong."""
        if self._look is None:
            self._look = self._choose(sessions)
        look = self._look
        if look is None:
            return None
        if sessions.get(look.resident.session_id) is not look.resident:  # dropped, or gone on
            self.abandon()
            return None
        stop = look.start + self.geometry.block_size
        try:
            at = look.again.n_rows
            self.compute(look.again, look.resident.token_ids[at : min(at + PIECE_ROWS, stop)])
        except OutOfKvMemory:
            self.abandon()  # memory is for turns
            return None
        if look.again.n_rows < stop:
            return None
        wrong = self._layers_that_differ(look, stop)
        self.abandon()
        self.n_audited += 1
        return self._alarm(look, wrong) if wrong else None

    def _choose(self, sessions: ResidentSessions) -> _Look | None:
        now = self.clock()
        if now < self._next_at:
            return None
        self._next_at = now + self.every_seconds
        candidates = [
            resident for resident in sessions if resident.session_id in self._restored and not resident.images
        ]
        if not candidates:
            return None
        resident = self.chance.choice(candidates)
        n_rows, snapshot = self._restored[resident.session_id]
        n_blocks = min(n_rows, len(resident.token_ids)) // self.geometry.block_size
        if not n_blocks:
            return None
        start = self.chance.randrange(n_blocks) * self.geometry.block_size
        return _Look(resident, snapshot, start, resident.sequence.fork(start))

    def _alarm(self, look: _Look, wrong: list[int]) -> str:
        self.n_wrong += 1
        session_id = look.resident.session_id
        self._restored.pop(session_id)
        log.error(
            "ALARM: rows %d to %d of session %s, restored from snapshot %s, are not what this node computes (layers "
            "%s): they are dropped; run `kvferry kv fsck` on the store and `kvferry doctor` on the nodes that wrote it",
            look.start, look.start + self.geometry.block_size - 1, session_id, look.snapshot,
            ", ".join(map(str, wrong)), extra={"session_id": session_id},
        )  # fmt: skip
        return session_id

    def _layers_that_differ(self, look: _Look, stop: int) -> list[int]:
        there, computed = (self.geometry.empty_planes(stop - look.start) for _ in range(2))
        wrong = []
        for layer in range(self.geometry.n_layers):
            look.resident.sequence.read_planes(layer, look.start, stop, there)
            look.again.read_planes(layer, look.start, stop, computed)
            if any(a.tobytes() != b.tobytes() for a, b in zip(there, computed, strict=True)):
                wrong.append(layer)
        return wrong
