"""What a reader of a turn may ask for, and what it is told when the coordinator lets go of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvferry.coordinator.errors import IndexOutOfRange, Stopping
from kvferry.coordinator.registry import FinishReason


def stopping() -> Stopping:
    return Stopping("the coordinator is stopping; the turn goes on when it is back: resume it then")


def moved() -> Stopping:
    return Stopping("another coordinator has the turn now: resume it, here or there")


def is_whole(reason: int) -> bool:
    """The answer has all its tokens.

    One that was cancelled, given up or out of time after a restart may have fewer than an earlier reader got: whoever
    comes back for more is told how it ended.
    """
    return reason not in {FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.DEADLINE}


def check_index(from_index: int, n_tokens: int) -> None:
    """Raises IndexOutOfRange. One past the last token is allowed: only the finish is left then."""
    if from_index > n_tokens:
        raise IndexOutOfRange(f"from_index is {from_index} and the answer has at most {n_tokens} tokens")


class Readers:
    """Who reads a turn's events: how many, and since when nobody does. Seconds of the given clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n = 0
        self._left_s = clock()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """For as long as somebody reads."""
        self._n += 1
        try:
            yield
        finally:
            self._n -= 1
            self._left_s = self._clock()

    def unread_seconds(self, since_s: float) -> float:
        """How long nobody has read, counted from ``since_s`` on."""
        return 0.0 if self._n else self._clock() - max(self._left_s, since_s)
