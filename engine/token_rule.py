"""Where a job's token is drawn: by its sampling settings, among those that its rule allows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.sampling import SampledToken, SamplingSettings, sample


class TokenRule(Protocol):
    """What the next token of one answer may be: a pure function of the answer's tokens so far, which it is told."""

    def mask(self) -> NDArray[np.uint32]:
        """One bit for each token that may come next, uint32 [words], lowest bit first; good until the next call.

        Raises EngineError when the rule turns out too complex to follow.
        """

    def accept(self, token_id: int) -> None:
        """That token came next. Raises EngineError when it was not allowed."""


def draw_token(
    logits: NDArray[np.float32], tokens_so_far: NDArray[np.int32], settings: SamplingSettings, rule: TokenRule | None
) -> SampledToken:
    """The token that comes after `tokens_so_far`, and the rule has been told of it. Raises EngineError as `sample`."""
    mask = None if rule is None else rule.mask()
    token = sample(logits, tokens_so_far, settings, len(tokens_so_far), mask)
    if rule is not None:
        rule.accept(token.token_id)
    return token
