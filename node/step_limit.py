"""How long an honest step may take, from those that were made: more, and the engine hangs. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

PATIENCE: Final = 20.0
"""A board that is suddenly ten times slower (heat, a neighbour) is busy and does not hang."""

N_STEPS: Final = 64
"""The slowest of so many is what is usual: depth, batch and clock change over more steps than that."""


class StepLimit:
    """Of one engine. Seconds throughout."""

    def __init__(self, most_rows: int) -> None:
        """``most_rows``: that one step computes."""
        self._most_rows = most_rows
        self._decode_steps: deque[float] = deque(maxlen=N_STEPS)
        self._prompt_rows: deque[float] = deque(maxlen=N_STEPS)

    def learn(self, n_rows: int, n_decoded: int, seconds: float) -> None:
        """A step of ``n_rows`` rows, ``n_decoded`` of them single tokens of answers, took so long."""
        if n_rows == n_decoded:
            self._decode_steps.append(seconds)
        else:
            self._prompt_rows.append(seconds / n_rows)

    def seconds(self, *, with_prompts: bool) -> float:
        """For the next step, which may compute rows of prompts or not; 0 while nothing like it was seen."""
        if with_prompts:
            return PATIENCE * self._most_rows * max(self._prompt_rows, default=0.0)
        return PATIENCE * max(self._decode_steps, default=0.0)
