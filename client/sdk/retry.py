"""How long and how often the SDK asks again; stamina does the waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from kvferry.client.errors import ClientError, is_worth_retrying

WAIT_INITIAL_S = 0.05
"""A coordinator that restarts is back within about a second; the first tries are cheap."""

WAIT_MAX_S = 2.0
"""A board that boots takes half a minute: asking every two seconds adds at most that to the pause."""

RETRY_AFTER_MAX_S = 30.0
"""A hint longer than this is cut: the patience of the caller, not of the server, decides when to give up."""


class RetryLimits(TypedDict):
    """Arguments of stamina.retry_context."""

    attempts: int | None
    timeout: float | None
    wait_initial: float
    wait_max: float
    wait_jitter: float


@dataclass(frozen=True, slots=True)
class Patience:
    """`total_s`: how long one outage may last before its error is raised; 0 = every error is raised at once."""

    total_s: float = 60.0

    def limits(self) -> RetryLimits:
        """For one outage."""
        return RetryLimits(
            attempts=1 if self.total_s <= 0 else None,
            timeout=self.total_s if self.total_s > 0 else None,
            wait_initial=WAIT_INITIAL_S,
            wait_max=WAIT_MAX_S,
            wait_jitter=WAIT_INITIAL_S,
        )


def backoff_of(error: Exception) -> bool | float:
    """stamina's hook: the server's hint in seconds, else True (stamina's own backoff) or False (raise)."""
    if not is_worth_retrying(error):
        return False
    hint = error.retry_after_s if isinstance(error, ClientError) else None
    return True if hint is None else min(hint, RETRY_AFTER_MAX_S)
