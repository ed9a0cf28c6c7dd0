"""A turn on its way through the node, and the box in which its events wait for the caller to read them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.sampling import SampledToken, SamplingSettings
from kvferry.engine.token_rule import TokenRule
from kvferry.engine.vision.placed import Images
from kvferry.node.errors import SlowClient

MAX_WAITING_TOKENS: Final = 4096
"""Tokens that may wait for a slow reader: minutes of decoding on a board, 100 KB without log-probabilities."""

TOKENS_PER_MESSAGE: Final = 256
"""With 20 alternatives each (about 300 B a token) a message stays below 100 KB; serialising it does not hold up the
loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Where the rows of a turn came from; see PrefixReport in common.proto."""

    n_tokens: int
    n_resident: int
    n_restored: int
    n_computed: int
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    look_seconds: float = 0.0
    n_looked: int = 0
    snapshot: str = ""
    refused_snapshots: tuple[str, ...] = ()

    @classmethod
    def in_memory(cls, n_tokens: int, n_resident: int) -> Prefix:
        """Rows that are in memory already; nothing was waited for."""
        return cls(
            n_tokens=n_tokens,
            n_resident=n_resident,
            n_restored=0,
            n_computed=0,
            queue_seconds=0.0,
            restore_seconds=0.0,
            prefill_seconds=0.0,
        )


@dataclass(frozen=True, slots=True)
class Token:
    """A drawn token and its index in the answer."""

    index: int
    sampled: SampledToken


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn ended as it should."""

    reason: Literal["end", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn ended by an error; any exception with a `code`."""

    error: Exception


Event = Prefix | Token | Finished | Failed


class Outbox:
    """Events of one turn, in order. Event loop only: the engine thread reaches it through `EngineThread`'s posts."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._n_tokens = 0
        self._arrived = asyncio.Event()
        self.closed = False

    def put(self, event: Event) -> None:
        """Add an event; raises SlowClient when too many tokens wait. After the last event the others are dropped."""
        if self.closed:
            return
        if isinstance(event, Token):
            self._n_tokens += 1
            if self._n_tokens > MAX_WAITING_TOKENS:
                error = SlowClient(
                    f"{MAX_WAITING_TOKENS} tokens wait to be read; read faster, or ask again for the rest"
                )
                self._events = [Failed(error)]
                self._close()
                raise error
        self._events.append(event)
        if isinstance(event, Finished | Failed):
            self._close()
        self._arrived.set()

    async def take(self) -> list[Event]:
        """All waiting events, at least one, at most a message full of tokens."""
        await self._arrived.wait()
        events, self._events = self._events[:TOKENS_PER_MESSAGE], self._events[TOKENS_PER_MESSAGE:]
        self._n_tokens -= sum(isinstance(event, Token) for event in events)
        if not self._events:
            self._arrived.clear()
        return events

    def _close(self) -> None:
        self.closed = True
        self._arrived.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One RunTurn call, parsed and bounded. `run_id` is unique in this process."""

    run_id: int
    session_id: str
    turn_id: str
    epoch: int
    token_ids: NDArray[np.int32]  # [n]: prompt, then the answer tokens that exist already
    n_prompt_tokens: int
    sampling: SamplingSettings
    max_tokens: int
    end_token_ids: frozenset[int]
    arrived_at: float  # on the monotonic clock, seconds
    coordinator: str = ""  # the instance that placed it
    priority: int = 0  # higher goes first
    recompute: bool = False  # whoever asks foresaw that computing is sooner than reading the store
    images: Images = ()  # in the prompt
    namespace: str = ""  # whose rows it may reuse
    rule: TokenRule | None = None  # what each token of the answer may be
    pixels: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)  # PNG files by content hash
    outbox: Outbox = field(default_factory=Outbox, repr=False)
