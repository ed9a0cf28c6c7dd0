"""Work in progress on the engine thread: turns with their rows, and calls that wait for rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.vision.placed import Images
from kvferry.engine.vision.sight import SeenPrompt
from kvferry.node.messages import LookRequest, RestoreRequest, RestoreSession
from kvferry.node.sessions import Resident
from kvferry.node.turns import Prefix, Turn


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """A turn with its rows. `turn.token_ids` and then `new_tokens` are its tokens."""

    turn: Turn
    sequence: KvSequence
    n_published: int
    n_resident: int
    n_restored: int = 0
    n_shared: int = 0  # taken over from others in memory after it was submitted
    snapshot: str = ""
    refused: tuple[str, ...] = ()
    restore: RestoreRequest | None = None  # set while the rows are awaited
    restore_asked_at: float = 0.0
    look: LookRequest | None = None  # set while the features of images are awaited
    seen: SeenPrompt | None = None
    restore_seconds: float = 0.0
    look_seconds: float = 0.0
    n_looked: int = 0  # image tokens that the vision tower worked on
    started_at: float | None = None
    new_tokens: list[int] = field(default_factory=list)
    n_publish_asked: int = 0
    logits: NDArray[np.float32] | None = None  # of the last token it came with, when they are known already

    @property
    def session_id(self) -> str:
        """The session."""
        return self.turn.session_id

    @property
    def images(self) -> Images:
        """All of them are the prompt's."""
        return self.turn.images

    @property
    def namespace(self) -> str:
        """Whose rows they are."""
        return self.turn.namespace

    def tokens_with_rows(self) -> NDArray[np.int32]:
        """The tokens whose rows exist, int32 [n_rows]."""
        tokens = np.concatenate([self.turn.token_ids, np.asarray(self.new_tokens, dtype=np.int32)])
        return tokens[: self.sequence.n_rows]

    def prefix(self, now: float, *, is_computed: bool) -> Prefix:
        """Where the rows came from, as the first token is there, or the answer was complete without one."""
        started_at = now if self.started_at is None else self.started_at
        n_tokens = len(self.turn.token_ids)
        waited = started_at - self.turn.arrived_at - self.restore_seconds - self.look_seconds
        return Prefix(
            n_tokens=n_tokens,
            n_resident=self.n_resident + self.n_shared,
            n_restored=self.n_restored,
            n_computed=n_tokens - self.n_resident - self.n_shared - self.n_restored if is_computed else 0,
            queue_seconds=max(waited, 0.0),
            restore_seconds=self.restore_seconds,
            look_seconds=self.look_seconds,
            n_looked=self.n_looked,
            prefill_seconds=now - started_at,
            snapshot=self.snapshot,
            refused_snapshots=self.refused,
        )


@dataclass(slots=True)
class Restoring:
    """A RestoreSession call that waits for rows."""

    wanted: RestoreSession
    request: RestoreRequest
    asked_at: float
    n_resident: int


def resident_of(wanted: RestoreSession, sequence: KvSequence, n_published: int) -> Resident:
    """The session with the rows that were found for it."""
    token_ids = wanted.token_ids[: sequence.n_rows]
    return Resident(
        wanted.session_id, token_ids, sequence, n_published, images=wanted.images, namespace=wanted.namespace
    )
