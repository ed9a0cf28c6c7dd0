"""What the threads of a node say to each other. All frozen; whoever receives a sequence owns it from then on.

event loop -> engine thread: BeginTurn ... Shutdown. engine thread -> I/O threads: RestoreRequest, PublishRequest.
I/O threads -> engine thread: RestoreDone, PublishDone. engine thread -> vision thread: LookRequest, and back LookDone.
engine thread -> event loop: turn events and replies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.vision.placed import Images
from kvferry.engine.vision.tower import Features
from kvferry.node.turns import Prefix, Turn
from kvferry.store.statistics import StoreStatistics

T = TypeVar("T")


class Reply(Generic[T]):
    """A future of the event loop that other threads may answer; an answer that nobody waits for any more is dropped."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[T] = self._loop.create_future()

    async def wait(self) -> T:
        """The answer; raises what `fail` was given."""
        return await self._future

    def ok(self, value: T) -> None:
        """Answer. Any thread."""
        self._answer(lambda: self._future.set_result(value))

    def fail(self, error: Exception) -> None:
        """Answer with an error. Any thread."""
        self._answer(lambda: self._future.set_exception(error))

    def _answer(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(lambda: None if self._future.done() else act())


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot that is in the store."""

    name: str
    n_tokens: int
    n_bytes: int
    seconds: float
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class StoreNews:
    """Which store it is, how its files are sealed, what is wrong with it, what it did; empty where that is unknown."""

    store_id: str = ""
    seal: str = ""
    error: str = ""
    statistics: StoreStatistics | None = None


@dataclass(frozen=True, slots=True)
class DrainCount:
    """What a drain achieved."""

    n_sessions_saved: int
    n_turns_moved: int


@dataclass(frozen=True, slots=True)
class BeginTurn:
    """Run a turn; events go to its outbox."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class StopRun:
    """End a run between two steps: as cancelled, or with an error."""

    run_id: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class RestoreSession:
    """Bring a prefix into memory."""

    session_id: str
    token_ids: NDArray[np.int32]
    images: Images
    reply: Reply[Prefix]
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class SaveSession:
    """Publish a session's rows and wait for it."""

    session_id: str
    reply: Reply[Published]


@dataclass(frozen=True, slots=True)
class DropSession:
    """Forget a session, and stop its run."""

    session_id: str
    reply: Reply[None]


@dataclass(frozen=True, slots=True)
class Drain:
    """End all runs and publish what is resident."""

    error: Exception
    reply: Reply[DrainCount]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine thread."""

    error: Exception


@dataclass(slots=True, eq=False)
class RestoreRequest:
    """Look for a prefix of token_ids longer than n_rows_at_least - 1, and read it into a new sequence.

    `abandoned` is set by the engine thread and read by the I/O thread: nobody waits for these rows any more.
    """

    request_id: int
    session_id: str
    token_ids: NDArray[np.int32]
    n_rows_at_least: int
    n_rows_at_most: int
    images: Images = ()
    wants_logits: bool = False  # with those of the last token, all rows are of use, even beyond n_rows_at_most
    namespace: str = ""
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class PublishRequest:
    """Publish all rows of `sequence`, a fork made for this."""

    request_id: int
    session_id: str
    token_ids: NDArray[np.int32]  # [sequence.n_rows]
    sequence: KvSequence
    n_blocks_freed: int  # when it is done: those of a session that left memory, none of one that stays
    replies: list[Reply[Published]] = field(default_factory=list)
    images: Images = ()
    logits: NDArray[np.float32] | None = None  # of the last token, to be saved with the rows
    namespace: str = ""


@dataclass(slots=True, eq=False)
class LookRequest:
    """Work out the features of images, whose scaled pixels are PNG files by content hash.

    `abandoned` is set by the engine thread and read by the vision thread: nobody waits for them any more.
    """

    images: Images
    pixels: Mapping[bytes, bytes]
    namespace: str = ""
    abandoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LookDone:
    """The answer to a LookRequest: features by content hash, or what is wrong.

    `n_tokens`: of the images that the tower worked on, for `seconds`; others it remembered.
    """

    request: LookRequest
    features: Mapping[bytes, Features] = field(default_factory=dict)
    n_tokens: int = 0
    seconds: float = 0.0
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreDone:
    """The answer to a RestoreRequest; `sequence` is None when nothing was restored. `logits` of the request's last
    token come with all of its rows only, float32 [vocab]."""

    request: RestoreRequest
    sequence: KvSequence | None = None
    logits: NDArray[np.float32] | None = None
    snapshot: str = ""
    refused: tuple[str, ...] = ()
    n_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishDone:
    """The answer to a PublishRequest."""

    request: PublishRequest
    published: Published | None = None
    already_there: bool = False
    error: Exception | None = None


StoreDone = RestoreDone | PublishDone

Command = (
    BeginTurn
    | StopRun
    | RestoreSession
    | SaveSession
    | DropSession
    | Drain
    | Shutdown
    | RestoreDone
    | PublishDone
    | LookDone
)
