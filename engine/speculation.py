"""Speculation: several tokens of an answer in one step, by proposing them and computing their rows together.

A proposal is accepted as far as the sampler draws the very tokens that were proposed, from the logits that plain
decoding would have seen: their bits do not depend on what else is in the batch. So an answer is the same token for
token with and without, at any temperature; a poor proposal costs time and nothing else. How many tokens are worth
proposing is weighed for each job at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.sampling_settings import SamplingSettings

MOST_GUESSES: Final = 16
"""Tokens proposed for one job in one step."""

MOST_GUESSED_ROWS: Final = 32
"""Proposed rows of a step, of all jobs together."""

MEMORY: Final = 0.9
"""What older verdicts count for at each new one: the last ten decide, since an answer may change its manner."""

ROW_COSTS: Final = (0.35, 0.3, 0.2, 0.15, 0.12)
"""What a proposed row adds to a step, in steps without any, until it was measured: of 1, 2 to 3, 4 to 7, 8 to 15, 16
proposed rows. The first ones cost most, since a single row is read past its weights at the memory's full speed."""

PROBE_EVERY: Final = 32
"""Steps after which a job whose proposals do not pay gets one all the same, where proposing costs something."""


@dataclass(frozen=True, slots=True)
class Ask:
    """``tokens``: int32 [n], a job's so far. ``serial`` tells jobs apart. ``n_most``: how many may be proposed."""

    serial: int
    tokens: NDArray[np.int32]
    n_most: int
    sampling: SamplingSettings


class Proposer(Protocol):
    """Guesses what comes next."""

    @property
    def is_free(self) -> bool:
        """Whether a proposal costs next to nothing."""

    def propose(self, asks: Sequence[Ask]) -> list[NDArray[np.int32]]:
        """For each at most ``n_most`` tokens, possibly none."""

    def forget(self, serial: int) -> None:
        """That job is over."""


class PromptLookup:
    """Proposes what followed when the latest tokens stood in the sequence before; ``longest`` to ``shortest`` of
    them."""

    is_free: Final = True

    def __init__(self, longest: int = 3, shortest: int = 2) -> None:
        self._sizes = range(longest, shortest - 1, -1)

    def propose(self, asks: Sequence[Ask]) -> list[NDArray[np.int32]]:
        return [self._continuation(ask.tokens, ask.n_most) for ask in asks]

    def forget(self, serial: int) -> None:
        """Nothing is kept."""

    def _continuation(self, tokens: NDArray[np.int32], n_most: int) -> NDArray[np.int32]:
        n = len(tokens)
        for size in self._sizes:
            n_places = n - size  # where the n-gram may begin, its last occurrence left out
            if n_places < 1:
                continue
            is_here = tokens[:n_places] == tokens[n - size]
            for i in range(1, size):
                is_here &= tokens[i : n_places + i] == tokens[n - size + i]
            places = np.flatnonzero(is_here)
            if len(places):
                # The latest place that has enough behind it, else the one with the most.
                enough = places[places + size + n_most <= n]
                start = int(enough[-1] if len(enough) else places[0]) + size
                return tokens[start : start + n_most]
        return tokens[:0]


@dataclass(slots=True)
class Guesses:
    """How often what was proposed for one job was right; recent verdicts count more."""

    n_right: float = 0.0
    n_wrong: float = 0.0
    n_idle: int = 0  # steps without a proposal

    @property
    def chance(self) -> float:
        """Of one proposed token, given that those before it were right."""
        return (self.n_right + 1.5) / (self.n_right + self.n_wrong + 2)  # three in four, before anything is known

    def learn(self, n_right: int, *, was_wrong: bool) -> None:
        """The verdict on a proposal: so many tokens were right, and whether the next one was wrong."""
        self.n_right = MEMORY * self.n_right + n_right
        self.n_wrong = MEMORY * self.n_wrong + was_wrong


def best_length(chance: float, row_costs: Sequence[float], n_decodes: int, n_most: int) -> int:
    """How many tokens to propose for one of ``n_decodes`` jobs: as many as make a step's tokens per second the most.

    The i-th of them is accepted with probability chance^i; ``row_costs`` as ROW_COSTS.
    """
    best, best_rate, tokens, accepted = 0, float(n_decodes), float(n_decodes), 1.0
    for n in range(1, n_most + 1):
        accepted *= chance
        tokens += accepted
        rate = tokens / (1 + row_costs[n.bit_length() - 1] * n)
        if rate > best_rate:
            best, best_rate = n, rate
    return best


@dataclass(slots=True)
class Speculator:
    """Decides what is proposed in a step, and learns what proposed rows cost. Not thread-safe."""

    proposer: Proposer
    _plain: dict[int, float] = field(default_factory=dict)  # seconds of a step by its number of decodes
    _row_costs: dict[int, list[float]] = field(default_factory=dict)  # by the same

    def propose(self, asks: Sequence[Ask], guesses: Sequence[Guesses]) -> tuple[list[NDArray[np.int32]], list[int]]:
        """For each job tokens, and how many of them to verify in this step: the others are only compared with what is
        drawn, to learn from them for nothing."""
        n, costs = len(asks), self._costs(len(asks))
        left = MOST_GUESSED_ROWS
        lengths = []
        for ask, record in zip(asks, guesses, strict=True):
            length = best_length(record.chance, costs, n, min(ask.n_most, MOST_GUESSES, left))
            if not length and not self.proposer.is_free and record.n_idle >= PROBE_EVERY:
                length = min(1, ask.n_most, left)
            record.n_idle = 0 if length else record.n_idle + 1
            lengths.append(length)
            left -= length
        wanted = [max(length, 1) if self.proposer.is_free else length for length in lengths]
        proposed = self.proposer.propose(
            [Ask(a.serial, a.tokens, min(w, a.n_most), a.sampling) for a, w in zip(asks, wanted, strict=True)]
        )
        return proposed, [min(length, len(tokens)) for length, tokens in zip(lengths, proposed, strict=True)]

    def learn(self, n_decodes: int, n_proposed: int, seconds: float) -> None:
        """What a step took that did nothing else."""
        plain = self._plain.get(n_decodes)
        if not n_proposed:
            self._plain[n_decodes] = seconds if plain is None else plain + 0.2 * (min(seconds, 2 * plain) - plain)
        elif plain:
            costs, size = self._costs(n_decodes), min(n_proposed.bit_length(), len(ROW_COSTS)) - 1
            cost = min(max((seconds / plain - 1) / n_proposed, 0.01), 1.0)
            costs[size] += 0.1 * (cost - costs[size])

    def _costs(self, n_decodes: int) -> list[float]:
        return self._row_costs.setdefault(n_decodes, list(ROW_COSTS))
