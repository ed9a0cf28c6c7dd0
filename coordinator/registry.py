"""What the coordinator remembers for ever, as a contract that any registry keeps (SQLite, etcd).

Rules that every implementation obeys, and that ``tests/coordinator/test_registry*.py`` hold against each of them:

- A method that returns has made its effect durable. A method that raises has had no effect, but for
  RegistryUnavailable, after which the effect may be there or not: whoever asks again finds out.
- The tokens of a session are the concatenation, in order, of ``prompt_ids`` and ``outcome.answer_ids`` of its *kept*
  turns (finished, and not by an error). They are the authority; text is never tokenised a second time.
- A session has at most one open turn. ``epoch`` only grows: each placement raises it, before a node is asked. The
  first one may come with ``begin_turn``; all others, and the first one when it comes later, are ``place_turn``'s.
  A new session begins at the highest epoch of any that was deleted, or at its own if that is higher: nodes remember
  sessions by name, and would take one that began anew for an old one.
- An open turn is the coordinator's that began or claimed it. As long as that one lives, ``claim_turn``, ``place_turn``
  and ``finish_turn`` of another raise TurnElsewhere; when it is gone, the first of them takes the turn over.
- Writes compare before they set: ``begin_turn`` checks the length of the history it was computed from,
  ``finish_turn`` the epoch, so that two coordinators over one registry cannot overwrite each other.

Every method may raise RegistryUnavailable besides what it names.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.engine.text.messages import Tool, ToolCall

TokenArray = npt.NDArray[np.int32]

NO_PIXELS: Final[Mapping[str, bytes]] = MappingProxyType({})


class FinishReason(enum.IntEnum):
    """Why an answer ended; the numbers are those of ``kvferry.v1.FinishReason``."""

    END = 1
    LENGTH = 2
    STOP_STRING = 3
    CANCELLED = 4
    ERROR = 5
    DEADLINE = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; ``role`` is system, user, assistant or tool. The rest as in chat.proto."""

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image of a turn's prompt as the model sees it; its pixels are kept by their content hash (SHA-256 in hex)."""

    content_hash: str
    # It stands before character ``at`` of message number ``message`` of the turn, and its tokens begin at index
    # ``start`` of the session's.
    message: int
    at: int
    start: int
    # In patches, tokens, pixels; bytes of the packed pixels.
    rows: int
    cols: int
    n_tokens: int
    width: int
    height: int
    n_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What an answer may hold beside its content, and what it has to be."""

    # Of the session, as of its first turn; with any, the marks of calls in the answer mean calls.
    tools: tuple[Tool, ...] = ()
    # As the request had it.
    thinking: bool | None = None
    # Made of the request's format and the tools, so that an upgrade cannot change a turn that is resumed; empty: none.
    grammar: str = ""
    # The prompt ends with the mark that thinking begins with.
    prompt_opened_thinking: bool = False
    # The marks of thinking in the answer mean thinking.
    reads_thinking: bool = True


PLAIN = AnswerForm()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A conversation, without its tokens."""

    session_id: str
    model: str
    # Token ids mean something under this tokenizer only.
    tokenizer_digest: str
    created_at_ms: int
    updated_at_ms: int
    epoch: int = 0
    # Of the kept turns.
    n_tokens: int = 0
    n_turns: int = 0
    open_turn_id: str = ""
    forked_from: str = ""
    # Whose it is; empty: nobody's in particular.
    tenant: str = ""
    # Deleted when nobody used it for so long; 0: never, as far as the session is concerned. Forks take it over.
    expires_after_s: int = 0

    @property
    def expires_at_ms(self) -> int:
        """If nobody uses it meanwhile; 0: never."""
        return self.updated_at_ms + 1000 * self.expires_after_s if self.expires_after_s else 0

    def is_expired(self, now_ms: int, before_ms: int) -> bool:
        """Whether it may be deleted: nobody used it since ``before_ms``, or for as long as it says itself."""
        is_unused = self.updated_at_ms < before_ms or 0 < self.expires_at_ms < now_ms
        return is_unused and not self.open_turn_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnOutcome:
    """How a turn ended. ``answer_ids``: int32[n_answer_tokens]."""

    reason: FinishReason
    answer_ids: TokenArray
    answer_text: str
    # Serialised GeneratedTokens when log-probabilities were asked for, else empty.
    logprobs: bytes = b""
    error_code: str = ""
    error: str = ""
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    longest_pause_seconds: float = 0.0
    n_placements: int = 0

    @property
    def kept(self) -> bool:
        """Whether the turn is part of the conversation from now on."""
        return self.reason is not FinishReason.ERROR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRecord:
    """One request, durable before its first token.

    ``prompt_ids``: int32[n], only what this turn adds to the history.
    """

    session_id: str
    turn_id: str
    # None: its prompt is raw, made without a template.
    messages: tuple[Message, ...]
    n_history_tokens: int
    prompt_ids: TokenArray
    # Serialised SamplingSettings with every default filled in, so that an upgrade cannot change a turn that is resumed.
    sampling: bytes
    # Of the answer; resolved, at least 1.
    max_tokens: int
    stop: tuple[str, ...]
    # Of the request as it came; the same turn_id with another digest is another turn.
    digest: str
    created_at_ms: int
    # Rows and tokens of a turn are those of one fingerprint; empty until the first placement.
    fingerprint: str = ""
    epoch: int = 0
    outcome: TurnOutcome | None = None
    form: AnswerForm = PLAIN
    pictures: tuple[Picture, ...] = ()
    # Higher goes first; as RunTurnRequest has it.
    priority: int = 0
    # Of the wall clock: it ends then with the tokens that it has; 0: never.
    deadline_ms: int = 0
    # The answers that were asked for with it; all but this one are turns of forks (``samples.py``).
    n_samples: int = 1

    @property
    def n_prompt_tokens(self) -> int:
        """History and new prompt together."""
        return self.n_history_tokens + len(self.prompt_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageKey:
    """Where a listing goes on: after this session, in order of (updated_at_ms, session_id) descending."""

    updated_at_ms: int
    session_id: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegistryCounts:
    n_sessions: int
    n_open_turns: int


class Registry(Protocol):
    """Sessions, turns and the coordinator's generation, durably. Called from one event loop; never blocks it."""

    @property
    def coordinator_id(self) -> str:
        """Made once per registry."""

    @property
    def generation(self) -> int:
        """Nodes obey no coordinator of a lower one.

        A registry for one coordinator raises it durably each time it is opened; those who share one share it.
        """

    @property
    def instance_id(self) -> str:
        """Of this coordinator among those who share the registry."""

    @property
    def is_shared(self) -> bool:
        """Other coordinators may have it open as well."""

    @property
    def is_new(self) -> bool:
        """Nothing was kept in it before."""

    async def close(self) -> None: ...

    async def announce(self, address: str) -> None:
        """Tell the others that share the registry where this coordinator serves."""

    async def keeps_house(self) -> bool:
        """Whether what one coordinator has to do for all is this one's to do now."""

    async def claim_turn(self, session_id: str, turn_id: str) -> None:
        """Make an open turn this coordinator's.

        Raises UnknownSession, UnknownTurn, and TurnElsewhere for as long as another one that lives has it.
        """

    async def create_session(self, session: SessionRecord) -> SessionRecord:
        """Returns it as it begins. Raises SessionExists."""

    async def get_session(self, session_id: str) -> SessionRecord:
        """Raises UnknownSession."""

    async def list_sessions(self, limit: int, after: PageKey | None) -> list[SessionRecord]:
        """Most recently used first."""

    async def fork_session(
        self, session_id: str, fork: SessionRecord, n_turns: int | None, last_outcome: TurnOutcome | None = None
    ) -> SessionRecord:
        """Make ``fork`` begin with the first ``n_turns`` kept turns (None: all).

        ``last_outcome``: of the last of them in the fork, in place of its own.

        Raises UnknownSession, SessionExists, and IndexOutOfRange when there are fewer turns.
        """

    async def import_session(
        self, session: SessionRecord, turns: Sequence[TurnRecord], pixels: Mapping[str, bytes] = NO_PIXELS
    ) -> SessionRecord:
        """Make a session with these turns, all of them kept, and ``session``'s counts of them; pixels as of begin_turn.

        Returns it as it begins. Raises SessionExists.
        """

    async def expired_sessions(self, now_ms: int, before_ms: int, limit: int) -> list[str]:
        """Sessions without an open turn that nobody used since ``before_ms``, or for as long as they themselves say."""

    async def delete_session(self, session_id: str) -> None:
        """Raises UnknownSession, and SessionBusy while a turn is open."""

    async def session_tokens(self, session_id: str) -> TokenArray:
        """All tokens of the kept turns. Raises UnknownSession."""

    async def list_turns(self, session_id: str) -> list[TurnRecord]:
        """In order, open and failed ones included. Raises UnknownSession."""

    async def session_and_turns(self, session_id: str) -> tuple[SessionRecord, list[TurnRecord]]:
        """Both as of one moment. Raises UnknownSession."""

    async def get_turn(self, session_id: str, turn_id: str) -> TurnRecord:
        """The turn, or the latest one for an empty ``turn_id``. Raises UnknownSession, UnknownTurn."""

    async def open_turns(self, known: Container[tuple[str, str]] = ()) -> list[TurnRecord]:
        """What a restarted coordinator has to go on with: those that no other one has.

        ``known``: session_id and turn_id of those to leave out.
        """

    async def begin_turn(self, turn: TurnRecord, pixels: Mapping[str, bytes] = NO_PIXELS, fingerprint: str = "") -> int:
        """``pixels``: PNG files of the turn's pictures by content hash, kept once for all sessions that use them.

        ``fingerprint``: of a node that it is placed on in the same step, as by ``place_turn``. Returns the epoch of
        that placement, or 0 without one.

        Raises UnknownSession, TurnExists, SessionBusy (an open turn, or a history of another length)."""

    async def pixels(self, content_hashes: Iterable[str]) -> dict[str, bytes]:
        """The pixels of pictures, of those that any session uses."""

    async def place_turn(self, session_id: str, turn_id: str, fingerprint: str) -> int:
        """Raise the session's epoch and return it. Raises UnknownTurn when the turn is not open."""

    async def finish_turn(
        self, session_id: str, turn_id: str, epoch: int, outcome: TurnOutcome, placements: Sequence[bytes], now_ms: int
    ) -> None:
        """Close the turn. ``placements``: serialised Placements, in order. Raises UnknownTurn, StaleEpoch."""

    async def list_placements(self, session_id: str) -> dict[str, list[bytes]]:
        """Of finished turns, by turn_id. Raises UnknownSession."""

    async def counts(self) -> RegistryCounts: ...


def tokens_of(turns: Iterable[TurnRecord]) -> TokenArray:
    """Of those that are kept: int32 [n]."""
    kept = [(turn.prompt_ids, turn.outcome.answer_ids) for turn in turns if turn.outcome and turn.outcome.kept]
    pieces = [ids for pair in kept for ids in pair]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)


def pictures_of(turns: Iterable[TurnRecord]) -> list[str]:
    """The content hashes."""
    return [picture.content_hash for turn in turns for picture in turn.pictures]
