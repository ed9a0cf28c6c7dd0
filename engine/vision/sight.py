"""A prompt with images, as the engine takes it chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import VisionConfig
from kvferry.engine.engine import Sight
from kvferry.engine.vision.positions import Grid, image_positions
from kvferry.engine.vision.tower import Features


class SeenPrompt:
    """What a sequence that begins with this prompt needs beside its tokens, also for tokens after the prompt.

    ``positions`` int32 [3, n] and ``rope_delta``: see ``image_positions``, which says what is raised.
    """

    def __init__(
        self, token_ids: NDArray[np.integer], grids: Sequence[Grid], features: Features, vision: VisionConfig
    ) -> None:
        self.positions, self.rope_delta = image_positions(token_ids, grids, vision)
        self._features = features
        self._image_rows = np.flatnonzero(np.asarray(token_ids) == vision.image_token_id)

    def sight(self, start: int, stop: int) -> Sight:
        """Of the sequence's tokens [start, stop)."""
        n_prompt = self.positions.shape[1]
        later = np.arange(max(start, n_prompt), max(stop, n_prompt), dtype=np.int32) + np.int32(self.rope_delta)
        positions = np.concatenate([self.positions[:, start:stop], np.tile(later, (3, 1))], axis=1)
        first, end = np.searchsorted(self._image_rows, [start, stop])
        return Sight(
            positions,
            self._image_rows[first:end] - start,
            self._features.embeds[first:end],
            self._features.deepstack[first:end],
        )
