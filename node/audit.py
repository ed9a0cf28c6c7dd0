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

MAX_REMEMBERED: Final = 1024
"""Sessions of which it is known how many of their rows were read from the store."""


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

    def note(self, session_id: str, n_rows: int, snapshot: str) -> None:
        """A session's first n_rows were read from this snapshot."""
        self._restored.pop(session_id, None)
        self._restored[session_id] = (n_rows, snapshot)
        if len(self._restored) > MAX_REMEMBERED:
            self._restored.popitem(last=False)

    def look(self, sessions: ResidentSessions) -> str | None:
        """Computes one random restored block again, if it is time; returns the session whose rows are wrong."""
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
        block_size = self.geometry.block_size
        n_blocks = min(n_rows, len(resident.token_ids)) // block_size
        if not n_blocks:
            return None
        start = self.chance.randrange(n_blocks) * block_size
        try:
            wrong = self._layers_that_differ(resident, start, start + block_size)
        except OutOfKvMemory:
            return None  # memory is for turns
        self.n_audited += 1
        if not wrong:
            return None
        self.n_wrong += 1
        self._restored.pop(resident.session_id)
        log.error(
            "ALARM: rows %d to %d of session %s, restored from snapshot %s, are not what this node computes (layers "
            "%s): they are dropped; run `kvferry kv fsck` on the store and `kvferry doctor` on the nodes that wrote it",
            start, start + block_size - 1, resident.session_id, snapshot, ", ".join(map(str, wrong)),
        )  # fmt: skip
        return resident.session_id

    def _layers_that_differ(self, resident: Resident, start: int, stop: int) -> list[int]:
        again = resident.sequence.fork(start)
        try:
            self.compute(again, resident.token_ids[start:stop])
            there, computed = (self.geometry.empty_planes(stop - start) for _ in range(2))
            wrong = []
            for layer in range(self.geometry.n_layers):
                resident.sequence.read_planes(layer, start, stop, there)
                again.read_planes(layer, start, stop, computed)
                if any(a.tobytes() != b.tobytes() for a, b in zip(there, computed, strict=True)):
                    wrong.append(layer)
            return wrong
        finally:
            again.release()
