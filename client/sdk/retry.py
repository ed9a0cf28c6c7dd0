"""How long and how often the SDK asks again. It says nothing by itself: a library leaves that to its caller's hook."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvferry.client.errors import ClientError, is_worth_retrying

WAIT_INITIAL_S: Final = 0.05
"""A coordinator that restarts is back within about a second; the first tries are cheap."""

WAIT_MAX_S: Final = 2.0
"""A board that boots takes half a minute: asking every two seconds adds at most that to the pause."""

RETRY_AFTER_MAX_S: Final = 30.0
"""A hint longer than this is cut: the patience of the caller, not of the server, decides when to give up."""

OnOutage = Callable[[ClientError, float], None]
"""Called once per outage of a short call, with the first error and the seconds for which it will be asked again."""


@dataclass(frozen=True, slots=True)
class Patience:
    """`total_s`: how long one outage may last before its error is raised; 0 = every error is raised at once."""

    total_s: float = 60.0


def backoff_of(error: ClientError) -> bool | float:
    """The server's hint in seconds, else True (our own backoff) or False (raise)."""
    if not is_worth_retrying(error):
        return False
    return True if error.retry_after_s is None else min(error.retry_after_s, RETRY_AFTER_MAX_S)


@dataclass
class Outage:
    """From the first failed try to the end of patience; begins when it is made. `jitter` spreads clients that fail
    together: it gives a number of seconds from 0 to its argument."""

    patience: Patience
    now: Callable[[], float] = time.monotonic
    jitter: Callable[[float], float] = lambda most: random.uniform(0, most)  # noqa: S311 - spreads load, no secret
    n_failures: int = 0
    _began_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_at = self.now()

    def delay_after(self, error: ClientError) -> float:
        """Seconds to wait before the next try. Raises `error` itself when it is final or patience has ended."""
        self.n_failures += 1
        hint = backoff_of(error)
        left_s = self.patience.total_s - (self.now() - self._began_at)
        if hint is False or left_s <= 0:
            raise error
        if hint is not True:
            return float(hint)
        return min(WAIT_MAX_S, WAIT_INITIAL_S * 2.0 ** min(self.n_failures - 1, 16) + self.jitter(WAIT_INITIAL_S))
